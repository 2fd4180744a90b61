"""The grouped table of a conversion, against tables written by hand."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary, LayerDecision
from lightning_fp8.convert.table import Row, grouped, rendered

LLAMA_3_8B = """\
layer                                                out × in       planned
--------------------------------------------------------------------------------
model.layers.0.*                                                    BF16     ×7
    in layer 0 of 32, one of the first 1
model.layers.{1-30}.self_attn.{q,o}_proj             4096 × 4096    FP8      ×60
model.layers.{1-30}.self_attn.{k,v}_proj             1024 × 4096    FP8      ×60
model.layers.{1-30}.mlp.{gate,up}_proj               14336 × 4096   FP8      ×60
model.layers.{1-30}.mlp.down_proj                    4096 × 14336   FP8      ×30
model.layers.31.*                                                   BF16     ×7
    in layer 31 of 32, one of the last 1
lm_head                                              128256 × 4096  BF16
    output head: the model's get_output_embeddings()
model.layers.{0-31}.{inp...ost_attention}_layernorm  4096           BF16     ×64
    in one kernel
model.norm                                           4096           BF16
    in one kernel
model.layers.{0,31}.mlp                                             BF16     ×2
    gate_proj runs in BF16
model.layers.{1-30}.mlp                                             FP8      ×30
    in one autograd function
210 of 225 linear layers planned in FP8:
87.2 % of the parameters of all matrices"""


def test_a_model_of_32_layers() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        summary = plan_conversion(LlamaForCausalLM(config), Policy()).summary
    assert str(summary) == LLAMA_3_8B
    assert len(summary.layers) == 225
    verbose = summary.table(verbose=True).splitlines()
    assert len(verbose) == 225 + 65 + 32 + 3
    for line, layer in zip(verbose[2:-1], summary.rows, strict=True):
        assert line.split("  ")[0] == layer.name
        assert line.endswith(layer.reason)


def rows(*names: str, shape: str = "8 × 8", precision: str = "FP8", reason: str = "") -> list[Row]:
    return [Row(name, shape, precision, reason) for name in names]


def named(found: list[Row]) -> dict[str, int]:
    return {row.name: row.count for row in found}


def test_numbers_become_ranges_and_other_parts_alternatives() -> None:
    blocks = [f"h.{block}.{name}" for block in (10, 9, 2, 0, 3) for name in ("c_fc", "c_proj")]
    assert named(grouped(rows(*blocks, "out"))) == {"h.{0,2-3,9-10}.c_{fc,proj}": 10, "out": 1}
    experts = [f"layers.{block}.experts.{expert}.w1" for block in range(2) for expert in range(3)]
    assert named(grouped(rows(*experts))) == {"layers.{0-1}.experts.{0-2}.w1": 6}
    assert named(grouped(rows("a.query", "a.key", "b.query_key"))) == {"a.{query,key}": 2, "b.query_key": 1}
    assert named(grouped(rows("a.proj", "a.proj_in"))) == {"a.{proj,proj_in}": 2}
    # Not every pair of both occurs: no line says so.
    assert named(grouped(rows("h.0.up", "h.0.down", "h.1.up"))) == {"h.{0-1}.up": 2, "h.0.down": 1}


def test_what_differs_is_not_merged() -> None:
    others = [
        *rows("h.0.fc"),
        *rows("h.1.fc", shape="8 × 16"),
        *rows("h.2.fc", precision="BF16", reason="skip"),
        *rows("h.3.fc", precision="BF16", reason="it was not called"),
    ]
    assert grouped(others) == others


def test_a_module_whose_layers_have_one_reason_is_one_line() -> None:
    found = grouped(
        [
            *rows("tower.fc", "tower.in.a", precision="BF16", reason="frozen"),
            *rows("tower.in.b", shape="4 × 4", precision="BF16", reason="frozen"),
            *rows("text.a", "text.b"),
        ]
    )
    assert found == [Row("tower.*", "", "BF16", "frozen", 3), Row("text.{a,b}", "8 × 8", "FP8", "", 2)]


def test_every_line_fits() -> None:
    name = ".".join(["a_long_name_of_a_module"] * 6)
    reason = "a reason of many words " * 8
    lines = rendered([Row(name, "128256 × 4096", "BF16", reason.strip(), 12)], "planned")
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("a_long_name")
    assert "..." in lines[2]
    assert " ".join(line.strip() for line in lines[3:]) == reason.strip()
    layers = tuple(LayerDecision(f"fc{number}", (16, 16), False, reason.strip()) for number in range(3))
    summary = ConversionSummary(layers, fallbacks=("a cast runs as plain torch, for want of a kernel; " * 4,))
    assert max(map(len, str(summary).splitlines())) <= 80
