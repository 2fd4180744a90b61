"""Spans: the format and margin that delayed scales were made for.

The scales of two recipes for one amax differ by a factor, the ratio of their spans.
"""

from __future__ import annotations

from typing import Any

from lightning_fp8.formats import Format
from lightning_fp8.recipes import DelayedScaling, float8_for
from lightning_fp8.scaled import Role
from lightning_fp8.scaling import rescaling

Span = tuple[Format, int]
"""A recipe's format and margin, which with an amax give a scale."""


def span_of(recipe: DelayedScaling) -> Span:
    """The span of the scales that ``recipe`` makes."""
    return recipe.fp8_format, recipe.margin


def span_ratio(before: Span | None, after: Span, role: Role) -> float:
    """The factor from a scale of ``role`` made for ``before`` to one for ``after``; 1 where ``before`` is unknown."""
    if before is None or before == after:
        return 1.0
    fp8_maxes = float8_for(before[0], role).max, float8_for(after[0], role).max
    return rescaling(fp8_maxes, (before[1], after[1]))


def saved_span(span: Span | None) -> dict[str, Any]:
    """The entries of a saved state that hold ``span``; none where it is unknown."""
    return {} if span is None else {"fp8_format": span[0].name, "margin": span[1]}


def span_in(state: dict[str, Any]) -> Span | None:
    """The span that the scales of a saved state were made for; ``None`` in older files, which do not say.

    Raises:
        ValueError: it is no format and margin of delayed scaling.
    """
    name = state.get("fp8_format")
    margin = state.get("margin")
    if name is None and margin is None:
        return None
    if not isinstance(name, str) or name not in Format.__members__:
        raise ValueError(f"FP8 state's 'fp8_format' must be the name of a format where it is there, not {name!r}")
    try:
        return span_of(DelayedScaling(fp8_format=Format[name], margin=margin))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"FP8 state's 'fp8_format' and 'margin' do not fit: {error}") from None
