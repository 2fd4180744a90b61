"""Records of runs that did not happen."""

from __future__ import annotations

import numpy as np

from lightning_fp8.monitor.alarms import Alarm
from lightning_fp8.monitor.record import INDEX, Interval, Record, empty_values

ROLES = ("input", "weight", "grad_output")


def record(layers: int = 3, intervals: int = 6, delayed: bool = True, alarm: bool = True) -> Record:
    """Of layers with hostile names; in the third interval the first one's input clips by 5 bits."""
    names = [f'blocks.{layer}.<b>"{layer}"</b>.{role}' for layer in range(layers) for role in ROLES]
    generator = np.random.default_rng(layers)
    found = Record(names, list(ROLES) * layers, "delayed" if delayed else "rowwise", "Recipe(<fields>)")
    found.formats = ["E4M3", "E4M3", "E5M2"] * layers
    found.exponents[:, 120:130] = 100.0
    found.exponents[:, 0] = 77.0  # zeros
    found.exponents[0, 100] = 1000.0
    for number in range(intervals):
        values = empty_values(len(names))
        figures = {
            "elements": 4096.0, "zeros": 96.0, "flushed": generator.integers(1, 40, len(names)), "signal": 1000.0,
            "noise": 1.0, "casts": 1.0,
        }  # fmt: skip
        if delayed:
            amax = generator.uniform(1, 2, len(names))
            figures |= {"updates": 50.0, "head_room": -np.log2(amax), "amax": amax, "scale": 448.0, "window": 2.0}
        for name, value in figures.items():
            values[:, INDEX[name]] = value
        if delayed and number == 2:
            for name, value in (("clipped_bits", 5.0), ("clipped_at", 121), ("clipped_steps", 1), ("head_room", -5.05)):
                values[0, INDEX[name]] = value
        found.add(Interval(50 * number + 1, 50 * number + 50, 5.0 - number / 2, values))
    for index in range(4):
        found.losses[:, index] = 0.025 / 4**index, 30.0
    if alarm:
        layer = names[0].rpartition(".")[0]
        found.alarms = [
            Alarm(
                "event", "outlier step", [layer], [names[0]], 121, 121, 1, "5.0 bits", "c</script>", "d", "e"
            ).as_dict(),
            Alarm("layer", "flushes", [layer], [names[0]], 51, 200, 3, "4 %", "c", "d", "e", [layer]).as_dict(),
        ]
    found.layers = [{"name": "a<b", "shape": "4 × 4", "precision": "FP8", "reason": ""}]
    found.verdict = "1 of 1"
    found.environment = {"torch": "<2>"}
    return found


def baseline(intervals: int = 6) -> Record:
    """A run without FP8."""
    found = Record([], [], "bf16-true")
    for number in range(intervals):
        found.add(Interval(50 * number + 1, 50 * number + 50, 4.9 - number / 2, empty_values(0)))
    return found
