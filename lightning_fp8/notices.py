"""A notice is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable


def say_once(
    said: dict[Hashable, str],
    message: str,
    key: Hashable = None,
    *,
    tell: Callable[[str], None] | None = None,
    category: type[Warning] = UserWarning,
    stacklevel: int = 2,
) -> None:
    """Issue the warning ``message``, unless ``said`` has it; ``said.clear()`` lets all be said again.

    Args:
        said: the messages that were said, by their keys.
        key: what makes two messages the same; None is the message.
        tell: called with the message instead of a warning.
        stacklevel: of the warning, as if the caller had issued it.
    """
    key = message if key is None else key
    if key in said:
        return
    said[key] = message
    if tell is None:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    else:
        tell(message)
