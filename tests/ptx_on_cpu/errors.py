from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel that cannot be translated, or a launch that does what a GPU would not forgive."""
