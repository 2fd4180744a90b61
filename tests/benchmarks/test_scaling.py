"""The formulas of ``benchmarks.scaling`` give what was counted, and docs/scaling.md has their table."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import scaling
from benchmarks.measuring.report import BEGIN, END
from benchmarks.scaling import SHAPES, Setup, Shape, Traffic, Weight
from lightning_fp8 import LayerNormMLP, convert_module, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.distributed.scripts import counted
from tests.tiers import thorough

SMALL = Shape(
    counted.LAYERS, counted.HIDDEN, counted.FFN, counted.HEADS, counted.KV_HEADS, counted.HEAD_DIM, counted.VOCABULARY
)


ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, copy = ROOT / "docs" / "scaling.md", tmp_path / "scaling.md"
    copy.write_text(f"before {BEGIN}{END} after")
    scaling.main([])
    table = capsys.readouterr().out
    scaling.main(["--write", str(copy)])
    assert table.count("\n") == 2 + len(scaling.ROWS)
    assert copy.read_text() == f"before {BEGIN}\n{table}{END} after"
    assert f"{BEGIN}\n{table}{END}" in page.read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["9b"], "invalid choice: '9b'"),
        (["8b", "8x1"], "'8x1' is not data x tensor x context ranks, as in 8x8x1"),
        (["8b", "8x0x1"], "'8x0x1' is not data x tensor x context ranks"),
        (["8b", "1x16x1"], "kv_heads=8 are not divisible by 16 tensor ranks"),
        (
            ["8b", "1x1x3"],
            "8192 tokens of a sequence cannot be split over 1 tensor x 3 context ranks; use a multiple of 6",
        ),
        (
            ["8b", "1x8x1", "9"],
            "9 tokens of a sequence cannot be split over 8 tensor x 1 context ranks; use a multiple of 8",
        ),
    ],
)
def test_wrong_arguments(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.main(args)
    assert says in capsys.readouterr().err


def test_the_table_has_the_models_sizes() -> None:
    """Parameters as the models' cards give them."""
    sizes = {name: shape.parameters for name, shape in SHAPES.items()}
    assert sizes == {
        "1b": 1_235_814_400,
        "3b": 3_212_749_824,
        "8b": 8_030_261_248,
        "70b": 70_553_706_496,
        "405b": 405_853_388_800,
    }
    assert SMALL.parameters == sum(parameter.numel() for parameter in counted.Llama().parameters())


@pytest.mark.parametrize(("tied", "kv_heads"), [(False, 2), (True, 4)])
def test_a_model_of_transformers_has_so_many_parameters(tied: bool, kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=200,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shape = Shape(3, 96, 160, 4, kv_heads, 24, 200, tied)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@thorough
def test_bf16_is_what_torch_sends(tmp_path: Path) -> None:
    """Of two ranks, a ring sends half of what is gathered or scattered, and all of what is all-reduced."""
    batch = {"micro_batch": counted.BATCH, "sequence_length": counted.LENGTH, "accumulate": counted.ACCUMULATE}
    part = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}
    for report in run_on_two_ranks("counted", str(tmp_path), folder=tmp_path):
        assert len(report) == 6
        for case, found in report.items():
            how, recompute = case.split(", ")
            mesh = {"data": 2} if how == "fsdp" else {"tensor": 2, "sequence_parallel": how == "sequence=True"}
            setup = Setup(SMALL, None, checkpointing=recompute == "True", **mesh, **batch)  # type: ignore[arg-type]
            expected: dict[str, Traffic] = {}
            for row, (count, size) in scaling.traffic(setup).items():
                kind = row.rpartition(" ")[2].rstrip("s").replace("-", "_")
                before = expected.get(kind, Traffic(0, 0))
                expected[kind] = Traffic(before.collectives + count, before.bytes + size)
            sent = {kind: Traffic(count, size * part[kind]) for kind, (count, size) in found.items()}
            del expected["all"]
            assert sent == {kind: each for kind, each in expected.items() if each.collectives}, case


@pytest.mark.parametrize(
    ("recipe", "rows", "total"),
    [
        (None, 512, 3161088),
        ("delayed", 512, 1588224),
        ("tensorwise", 512, 1588224),
        ("blockwise", 512, 1588608),
        ("rowwise", 512, 1606656),
        ("mxfp8", 512, 1637376),
        (None, 513, 3170328),
        ("delayed", 513, 1592856),
        ("blockwise", 513, 2382600),
    ],
)
def test_fp8_gathers_are_what_was_counted(recipe: str | None, rows: int, total: int) -> None:
    """Three blocks of LayerNorm, 256 to ``rows`` and back, two ranks, four gathers: bytes of a rank's shards."""
    setup = Setup(SMALL, recipe, data=2)
    weights = [Weight(rows, 256, "none"), Weight(256, rows, "none")]
    wide = [Weight(rows, 1, "none"), *[Weight(256, 1, "none")] * 3]  # biases and the norm
    block = sum(scaling.gathered_bytes(setup, each) for each in weights) / 2 + sum(
        2 * setup.shard(each) for each in wide
    )
    assert 3 * 4 * block == total


@pytest.mark.parametrize(
    ("recipe", "again", "units"),
    [
        (None, False, 16),
        (None, True, 20),
        ("delayed", False, 12),
        ("delayed", True, 14),
        ("rowwise", False, 16),
        ("rowwise", True, 18),
    ],
)
def test_bytes_of_a_block_with_sequence_parallelism(recipe: str | None, again: bool, units: int) -> None:
    """In units of M H, the tokens times the channels, as counted on two ranks; scales of rows come on top."""
    setup = Setup(SHAPES["8b"], recipe, tensor=4, gather_again=again)
    sent = scaling.tensor_block_all_gathers(setup).bytes + scaling.tensor_block_sums(setup).bytes
    scales = 2 * 4 / setup.shape.hidden if recipe == "rowwise" and again else 0
    assert sent == pytest.approx((units + scales) * setup.tokens * setup.shape.hidden * 3 / 4)


@pytest.mark.parametrize(
    ("recipe", "checkpointing", "gathers", "size"),
    [
        (None, False, 1, 65_536),
        (None, True, 2, 131_072),
        ("tensorwise", False, 2, 65_600),
        ("tensorwise", True, 3, 98_400),
    ],
)
def test_context_parallelism_sends_what_was_counted(
    recipe: str | None, checkpointing: bool, gathers: int, size: int
) -> None:
    """On two ranks, by a dispatch mode: 512 tokens, two heads of 32 channels; the mean of keys is not counted."""
    shape = Shape(1, 128, 256, 4, 2, 32, 256)
    options = {"context": 2, "sequence_length": 512, "bf16_blocks": 0, "fp8_attention": True}
    setup = Setup(shape, recipe, checkpointing=checkpointing, **options)  # type: ignore[arg-type]
    assert scaling.context_all_gathers(setup) == Traffic(gathers, size)
    assert scaling.context_reduce_scatters(setup) == Traffic(1, 65_536)


def test_copies_that_micro_batches_share_are_counted() -> None:
    """Two bytes for each weight that runs in FP8, without FSDP2."""
    alone = Setup(SHAPES["8b"], "delayed", accumulate=8)
    shape = alone.shape
    matrices = 2 * shape.hidden**2 + 2 * shape.hidden * shape.kv_heads * shape.head_dim + 3 * shape.hidden * shape.ffn
    assert scaling.gathered_weight_memory(alone) == 2 * matrices * (shape.layers - 2)
    for other in (replace(alone, accumulate=1), replace(alone, recipe=None)):
        assert scaling.gathered_weight_memory(other) == 0


def test_fsdp_sends_a_third_less() -> None:
    """2 + 2 + 2 bytes per parameter become 1 + 1 + 2."""
    setup = Setup(SHAPES["70b"], "delayed", data=64, bf16_blocks=0)
    both = []
    for each in (replace(setup, recipe=None), setup):
        gathers, scatters = scaling.fsdp_all_gathers(each).bytes, scaling.fsdp_reduce_scatters(each).bytes
        of_root = 2 * scaling.gathered_root_bytes(each) * 63 / 64
        both.append(gathers + scatters - of_root)
    assert both[1] / both[0] == pytest.approx(4 / 6, abs=1e-4)


def test_weights_without_whole_blocks_are_gathered_in_bf16() -> None:
    weight = SHAPES["8b"].linears[0]
    fits = {
        (recipe, shards): scaling.gathers_fp8(Setup(SHAPES["8b"], recipe, data=shards), weight)
        for recipe in ("delayed", "blockwise", "mxfp8")
        for shards in (32, 64, 128, 256)
    }
    assert [shards for (recipe, shards), fp8 in fits.items() if recipe == "blockwise" and fp8] == [32]
    assert [shards for (recipe, shards), fp8 in fits.items() if recipe == "mxfp8" and fp8] == [32, 64, 128]
    assert all(fp8 for (recipe, _), fp8 in fits.items() if recipe == "delayed")


# --- Activations ------------------------------------------------------------------------------------------------------


class WithLayerNorm(counted.Block):
    """torch's RMSNorm is several operations on a CPU, which keep more; its LayerNorm keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(counted.HIDDEN), nn.LayerNorm(counted.HIDDEN)


class Fused(WithLayerNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.Identity()  # type: ignore[assignment]
        self.mlp = LayerNormMLP(  # type: ignore[assignment]
            counted.HIDDEN, counted.FFN, bias=False, normalization="RMSNorm", activation="swiglu"
        )


class WithAllHeads(WithLayerNorm):
    """As many heads of keys as of queries: torch 2.8 has no other attention on a CPU that keeps no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = counted.Attention(counted.HEADS)


def kept(block: nn.Module, x: Tensor, recipe: str | None) -> tuple[int, int]:
    """Bytes that autograd saves beside parameters, each storage once: of all, and of statistics of LayerNorm."""
    parameters = {each.untyped_storage().data_ptr() for each in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = nullcontext() if recipe is None else fp8_autocast(fp8_recipe=recipe)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        block(x)
    statistics = [each for each in saved.values() if each.dim() == 3 and each.shape[-1] == 1]
    sizes = [sum(each.untyped_storage().nbytes() for each in found) for found in (saved.values(), statistics)]
    return sizes[0], sizes[1]


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)


@pytest.mark.parametrize("kind", [WithAllHeads, WithLayerNorm, Fused])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_activations_are_what_autograd_saves(recipe: str | None, kind: type[WithLayerNorm]) -> None:
    if OLD and kind is not WithAllHeads:
        pytest.skip("this torch's attention on a CPU keeps the scores of grouped heads")
    shape = replace(SMALL, kv_heads=SMALL.heads) if kind is WithAllHeads else SMALL
    fused = kind is Fused and recipe is not None
    block = (WithLayerNorm if kind is Fused and not fused else kind)().bfloat16()
    if recipe is not None:
        convert_module(block, first_last_layers_bf16=False)
    x = torch.randn(2, 64, counted.HIDDEN, dtype=torch.bfloat16).requires_grad_() * 1
    found, statistics = kept(block, x, recipe)
    norms = 1 if fused else 2
    setup = Setup(shape, recipe, micro_batch=2, sequence_length=64, fused=fused)
    assert found - statistics == scaling.block_activations(setup) - norms * 4 * setup.tokens
