"""Values of options of the command line."""

from __future__ import annotations

import argparse

LINEAR = "size of a linear layer, in_features x out_features, as in 4096x14336; may be repeated"
TOKENS = "rows of the layers' inputs, batch size times sequence length; default: %(default)s"
"""Help on options of several commands."""


def sizes(text: str) -> tuple[int, int]:
    """Parse ``"4096x14336"``, the in and out features of a layer."""
    inputs, _, outputs = text.partition("x")
    if not (inputs.isdigit() and outputs.isdigit() and int(inputs) and int(outputs)):
        raise argparse.ArgumentTypeError(f"{text!r} must be in_features x out_features, as in 4096x14336")
    return int(inputs), int(outputs)


def count(text: str) -> int:
    """Parse a number of at least 1."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
