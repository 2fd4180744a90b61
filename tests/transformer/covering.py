"""Cases in which every two values of different options meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def covering(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Few cases that hold each pair of values that some allowed case can hold; always the same ones.

    Greedy: each case begins with a pair that is still missing and takes, option by option, the value that meets most.
    """
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(options, 2)
        for a in options[one]
        for b in options[two]
    }
    order = {name: index for index, name in enumerate(options)}

    def still_missing(case: Mapping[str, Any]) -> set[Any]:
        said = sorted(case.items(), key=lambda item: order[item[0]])
        return missing & set(itertools.combinations(said, 2))

    cases = []
    while missing:
        first = min(missing, key=repr)
        case = _completed(dict(first), options, allowed, lambda case: len(still_missing(case)))
        if case is None:
            missing.discard(first)
        else:
            missing -= still_missing(case)
            cases.append({name: case[name] for name in options})
    return cases


def _completed(
    case: dict[str, Any],
    options: Mapping[str, Sequence[Any]],
    allowed: Callable[[Mapping[str, Any]], bool],
    met: Callable[[Mapping[str, Any]], int],
) -> dict[str, Any] | None:
    for name in options:
        if name not in case:
            fitting = [{**case, name: value} for value in options[name] if allowed({**case, name: value})]
            if not fitting:
                return None
            case = max(fitting, key=met)
    return case if allowed(case) else None
