"""torchao's import paths: ``from lightning_fp8.torchao.float8 import convert_to_float8_training``."""
