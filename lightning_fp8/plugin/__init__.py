"""FP8 as a precision plugin of Lightning, for Fabric and for the Trainer, and errors of its arguments."""

from lightning_fp8.plugin.hints import extend_parsers

extend_parsers()
