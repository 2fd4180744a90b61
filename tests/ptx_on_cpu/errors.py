from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel cannot be translated, or a launch has an error that the emulator detects."""
