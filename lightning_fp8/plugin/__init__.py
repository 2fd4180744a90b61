"""FP8 as a precision plugin of Lightning: Fabric's, the Trainer's, and what both say of wrong arguments."""

from lightning_fp8.plugin.hints import extend_parsers

extend_parsers()
