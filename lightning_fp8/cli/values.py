"""Values of options of the command line."""

from __future__ import annotations

import argparse


def sizes(text: str) -> tuple[int, int]:
    """Parse ``"4096x14336"``, the in and out features of a layer."""
    inputs, _, outputs = text.partition("x")
    if not (inputs.isdigit() and outputs.isdigit() and int(inputs) and int(outputs)):
        raise argparse.ArgumentTypeError(f"{text!r} is not in x out features, as in 4096x14336")
    return int(inputs), int(outputs)


def count(text: str) -> int:
    """Parse a number of at least 1."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
