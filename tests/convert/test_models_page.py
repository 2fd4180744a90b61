"""The table of models in docs/models.md says what is planned for the models of the zoo."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.convert.summary import ATTENTION
from tests.convert.zoo import ZOO
from tests.docs.pages import ROOT

ROWS = re.findall(r"^\| (.*?) \| .*? \| (.*?) \| (.*?) \|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
NOT_IN_IT = {"torch_transformer", "peft_lora"}


@pytest.mark.parametrize("name", sorted(set(ZOO) - NOT_IN_IT))
def test_a_row_is_what_is_planned(name: str) -> None:
    if find_spec(ZOO[name].needs) is None:
        pytest.skip(f"needs {ZOO[name].needs}")
    model = ZOO[name].make()
    plugin = FP8FabricPrecision(attention="always")
    plugin.convert_module(model)
    assert plugin.summary is not None
    (row,) = [row for row in ROWS if f"`{type(model).__name__}`" in row[0]]
    fused = {"norms": plugin.summary.norms, "MLPs": plugin.summary.mlps}
    planned = ", ".join(what for what, rows in fused.items() if any(each.fp8 for each in rows)) or "no"
    attention = any(each.fp8 for each in plugin.summary.layers if each.kind == ATTENTION)
    assert row[1:] == (planned, "yes" if attention else "no")
