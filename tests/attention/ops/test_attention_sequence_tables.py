"""Tables of packed sequences: one for all layers of a step, and another one whenever lengths may be other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from cuda_kernels.attention.host.backward import BackwardLaunch
from cuda_kernels.attention.host.forward import AttentionProblem
from cuda_kernels.attention.host.tiles import BatchTables, RowSpace, Visible, packed_rows
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.launch import executing
from lightning_fp8 import DotProductAttention, fp8_autocast
from lightning_fp8.attention import function, sequence_tables
from lightning_fp8.attention.function import _longest, fp8_attention
from lightning_fp8.attention.ops import (
    Attention,
    Band,
    attention_tables,
    rows_of_mean,
)
from lightning_fp8.attention.ops.cuda import visible
from tests.attention.attention_modules import cu_seqlens

HOST = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of tables that are made, by attention that takes the CPU for a card."""
    calls: list[tuple[Any, ...]] = []

    def noted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return attention_tables(*arguments)

    monkeypatch.setattr(sequence_tables, "on_card", lambda device: True)
    monkeypatch.setattr(function, "attention_tables", noted)
    return calls


def attend(starts: Tensor, keys: Tensor | None = None, requires_grad: bool = True, **options: Any) -> Tensor:
    q = torch.randn(40, 2, 32, requires_grad=requires_grad)
    keys = starts if keys is None else keys
    return fp8_attention(q, q, q, qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=keys, **options)


def test_layers_of_a_step_share_their_tables_and_the_next_step_makes_others(made: list[Any]) -> None:
    starts = cu_seqlens([30, 10])
    for step in (1, 2):
        layers = [attend(starts, band=Band(right=0)) for _ in range(3)]
        assert len(made) == step
        sum(o.sum() for o in layers).backward()  # type: ignore[union-attr]
        del layers
        gc.collect()
    assert not [ref for _, made_of in sequence_tables._kept.values() for ref in made_of if ref() is not None]


def test_layers_that_get_one_padding_mask_share_them_too(made: list[Any]) -> None:
    mask = torch.arange(20) >= torch.tensor([20, 13])[:, None]
    layers = [DotProductAttention(2, 32, qkv_format="bshd", attn_mask_type="padding_causal") for _ in range(3)]
    x = torch.randn(2, 20, 2, 32, requires_grad=True)
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        graph = [layer(x, x, x, attention_mask=mask) for layer in layers]
        assert len(made) == 1
        mask[1, 12] = True
        graph.append(layers[0](x, x, x, attention_mask=mask))
    assert len(made) == 2
    assert torch.equal(graph[0], graph[1])
    assert graph[0][1, 12].any()
    assert not graph[-1][1, 12].any()


def test_what_may_be_other_lengths_has_tables_of_its_own(made: list[Any]) -> None:
    starts = cu_seqlens([30, 10])
    graph = [attend(starts)]
    starts[1] = 20
    graph.append(attend(starts))
    assert len(made) == 2, "written to"
    graph.append(attend(starts.clone()))
    assert len(made) == 3, "another tensor"
    graph.append(attend(starts, starts.clone()))
    assert len(made) == 4, "other keys"
    graph.append(attend(starts, band=Band(left=3, right=0)))
    assert len(made) == 5, "another mask"
    graph.append(attend(starts))
    assert len(made) == 5


def test_lengths_whose_changes_nobody_counts_meet_torchs_own_error(made: list[Any]) -> None:
    with torch.inference_mode():
        starts = cu_seqlens([30, 10])
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attend(starts)


def test_without_gradients_each_op_makes_what_it_needs(made: list[Any]) -> None:
    starts = cu_seqlens([30, 10])
    attend(starts, requires_grad=False)
    with torch.no_grad():
        attend(starts)
    assert not made


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("band", [Band(right=0, bottom_right=True), Band(left=70)])
def test_joined_tables_are_those_of_each_pass(qkv_format: str, band: Band) -> None:
    queries, keys, config = (
        cu_seqlens([1, 130, 0, 9]),
        cu_seqlens([200, 3, 5, 0]),
        Attention(qkv_format, band),
    )
    rows = (150, 300) if qkv_format == "thd" else (130, 200)
    arguments = queries, keys, config, *rows, HOST
    flat = queries, keys, *config.flat, *rows, HOST
    torch.library.opcheck(torch.ops.lightning_fp8.attention_tables.default, flat)
    spaces = [RowSpace(4, each, qkv_format == "thd") for each in rows]
    expected = BatchTables.of(
        *(packed_rows(space, starts, HOST) for space, starts in zip(spaces, (queries, keys))),
        visible(band),
        rows_of_mean(band),
    )
    found = BatchTables.split(attention_tables(*arguments), *spaces, rows_of_mean(band))
    for ours, right in zip(*((*each.queries, *each.keys, *each[2:]) for each in (found, expected))):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            assert torch.equal(ours, right)
            assert ours.stride(0) == 2 or ours.data_ptr() % 16 == 0, "entries that are loaded at once are aligned"


# ------------------------------------------------------------------------------------------------- the longest sequence


@pytest.mark.parametrize(
    ("longest", "band", "needs"),
    [(None, Visible(), True), (512, Visible(), False), (1024, Visible(), True), (None, Visible(200, 0), False)],
)
def test_short_sequences_need_no_memory_for_sums_on_the_way(longest: int | None, band: Visible, needs: bool) -> None:
    space = RowSpace(9, 4096, True)
    problem = AttentionProblem(AttentionSpec(64, "bfloat16"), (2, 1), space, space, band, 0.1, longest)
    with executing(lambda *launched: None):
        launch = BackwardLaunch(problem, (0, 128, 64), (0, 64, 64), HOST)
    assert bool(launch._scratch_floats) == needs


@pytest.mark.parametrize(("said", "known"), [(0, 128), (128, 128), (129, 256), (1000, 1024)])
def test_the_longest_sequence_is_said_in_powers_of_two(said: int, known: int) -> None:
    found = _longest(said, torch.empty(3, device="meta"))
    assert found == known


def test_a_longer_sequence_than_was_said_is_an_error() -> None:
    module, x = DotProductAttention(2, 32, qkv_format="thd"), torch.randn(300, 2, 32)
    starts = cu_seqlens([270, 30])
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        right = module(x, x, x, cu_seqlens_q=starts)
        assert torch.equal(module(x, x, x, cu_seqlens_q=starts, max_seqlen_q=270), right)
        with pytest.raises(ValueError, match="max_seqlen_q=269, and cu_seqlens_q has a sequence of 270 rows; pass 270"):
            module(x, x, x, cu_seqlens_q=starts, max_seqlen_q=269)
    for wrong, error in ((-1, ValueError), ("270", TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"max_seqlen_q={wrong!r} must be"):
            module(x, x, x, cu_seqlens_q=starts, max_seqlen_q=wrong)
    config = Attention("thd", longest_query=256)
    with pytest.raises(RuntimeError, match="more than 256 rows; pass its max_seqlen_q"):
        attention_tables(starts, starts, config, 300, 300, HOST)


@pytest.mark.usefixtures("nothing_traced")
def test_a_compiled_model_makes_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_tables, "on_card", lambda device: True)
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([DotProductAttention(2, 32, qkv_format="thd") for _ in range(2)])

        def forward(self, x: Tensor, starts: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, x, x, cu_seqlens_q=starts, cu_seqlens_kv=starts).view_as(x)
            return x

    model, starts = Twice(), cu_seqlens([30, 10])
    x = torch.randn(40, 2, 32, requires_grad=True)
    inductors = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, fullgraph=True, backend=inductors)
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        ours, right = compiled(x, starts), model(x, starts)
        (gradient,), (expected,) = (torch.autograd.grad(y.square().sum(), x) for y in (ours, right))
    assert torch.equal(ours, right)
    assert torch.equal(gradient, expected)
    op = torch.ops.lightning_fp8.attention_tables.default
    assert [sum(node.target is op for node in graph.graph.nodes) for graph in graphs] == [1, 0]
