"""Attention of sequences that are split over processes: as one process's, with keys and values as codes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_fp8.convert.attention_calls import sdpa
from tests.distributed.launch import run_on_ranks
from tests.tiers import thorough

BATCHES = {"causal": 2, "no mask": 2, "sbhd window": 1, "cross": 1, "short": 2, "sink": 2}
KEYS = {"cross": 2048, "short": 80, "sink": 64}
GROUPS, CHANNELS = 2, 16
COLLECTIVES = {
    "high": ["_allgather_base_", "_reduce_scatter_base_"],
    "fp8": ["allreduce_", "_allgather_base_", "_allgather_base_", "_reduce_scatter_base_"],
}


@pytest.fixture(
    scope="module",
    params=[
        (2, "causal,short"),
        pytest.param((4, "causal"), marks=thorough),
        pytest.param((2, "no mask,sbhd window,cross,sink"), marks=thorough),
        pytest.param((4, "no mask,sbhd window,cross,short,sink"), marks=thorough),
    ],
    ids=["2", "4", "2, other cases", "4, other cases"],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder, (number, cases) = tmp_path_factory.mktemp("ranks"), request.param
    return run_on_ranks("context_parallel", str(folder), cases, folder=folder, ranks=number)


def _each(ranks: list[Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(name, way, case[way]) for report in ranks for name, case in report["cases"].items() for way in COLLECTIVES]


def test_outputs_and_gradients_are_as_exact_as_those_of_one_process(ranks: list[Any]) -> None:
    for name, way, found in _each(ranks):
        in_bf16 = way == "high" or name == "sink"
        for ours, of_one in zip(found["exact"], found["one exact"], strict=True):
            assert ours < (0.02 if in_bf16 else 0.09), (name, way)
            assert ours < 1.25 * of_one + 3e-3, (name, way)


def test_what_a_rank_computes_alone_is_what_one_process_computes(ranks: list[Any]) -> None:
    """Codes and scales are the same, so the output and the queries' gradient are; sums over queries are in parts."""
    for name, way, found in _each(ranks):
        o, dq, dk, dv = found["one"]
        if name != "short":  # blocks of scales begin elsewhere there
            in_bf16 = way == "high" or name == "sink"  # torch's kernels add in another order for fewer keys
            assert max(o, dq) < (4e-3 if in_bf16 else 1e-3), (name, way)
        assert max(dk, dv) < (0.01 if way == "high" or name == "sink" else 0.09), (name, way)


def test_keys_and_values_travel_as_codes(ranks: list[Any]) -> None:
    for report in ranks:
        for name, case in report["cases"].items():
            elements = BATCHES[name] * KEYS.get(name, 1024) // len(ranks) * GROUPS * CHANNELS  # of a rank's keys
            for way, expected in COLLECTIVES.items():
                as_codes = way == "fp8" and name not in ("short", "sink")
                travelled = [each for each in case[way]["collectives"] if not each[0].startswith("allgather_")]
                assert [each[0] for each in travelled] == (expected if as_codes else COLLECTIVES["high"])
                gathered = {size for what, size, _ in travelled if "allgather" in what}
                scales = 2 * 4 * elements // (128 * CHANNELS)
                assert gathered == {2 * elements + scales if as_codes else 4 * elements}, (name, way)
                summed = [(size, dtype) for what, size, dtype in travelled if "reduce_scatter" in what]
                assert summed == [(2 * 2 * elements * len(ranks), "torch.bfloat16")], (name, way)


def test_where_codes_cannot_be_gathered_it_is_said(ranks: list[Any]) -> None:
    for name, way, found in _each(ranks):
        said = [text for text in found["said"] if "gathers keys and values as torch.bfloat16" in text]
        assert len(said) == (name == "short" and way == "fp8"), (name, way)


def test_recomputed_it_is_the_same_to_the_bit(ranks: list[Any]) -> None:
    assert all(case["checkpointed"] for report in ranks for case in report["cases"].values())


def test_a_layer_turns_queries_by_their_positions_and_observes_its_part(ranks: list[Any]) -> None:
    for report in ranks:
        assert report["layer"]["copy"], "a copy attends with the same ranks"
        assert report["layer"]["y"] < 2e-3
        assert report["layer"]["dx"] < 2e-3
    for name, whole in ranks[0]["layer"]["one"].items():
        parts = [report["layer"]["many"][name] for report in ranks]
        if not name.endswith(("do", "dqkv")):  # a rank's loss is the mean of its own rows
            assert max(parts) == pytest.approx(whole, rel=2e-2), name
        assert name in ("s", "dp") or min(parts) > 0, name


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("thd", "NotImplementedError: qkv_format='thd' is not supported with context parallelism"),
        ("padding", "NotImplementedError: attn_mask_type='padding' is not supported with context parallelism"),
        ("alibi", "NotImplementedError: core_attention_bias_type='alibi' is not supported"),
        ("window", "NotImplementedError: a window of 2 keys before and 2 after the diagonal"),
        (
            "odd",
            "ValueError: query_layer has 7 rows on this rank, which is not an even number; pad sequences to a multiple",
        ),
        ("length", "ValueError: a sequence of 30 rows does not divide into "),
        ("group", "TypeError: cp_group is object; pass a torch.distributed.ProcessGroup"),
        ("ranks", "ValueError: cp_global_ranks=[5, 6], but cp_group has ranks [0, 1"),
        ("two groups", "NotImplementedError: cp_comm_type='a2a+p2p', with two groups, is not supported"),
        ("pickled", "RuntimeError: this attention was pickled with a context-parallel group"),
        ("unlike", "query_layer=(2, 6, 2, 16)"),
        ("fullgraph", "Unsupported: "),
        ("compiled", "True"),
    ],
)
def test_what_is_not_supported_says_so(ranks: list[Any], what: str, message: str) -> None:
    for report in ranks:
        assert message in report["refused"][what]


@pytest.mark.parametrize("where", [(F, "scaled_dot_product_attention"), (sdpa, "_torch")], ids=["around", "inside"])
def test_a_part_of_torchs_own_context_parallel_is_not_taken_for_the_whole(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_a_ring(*args: Any, **kwargs: Any) -> None: ...

    q = torch.randn(1, 2, 4, 16)
    assert not sdpa.why_not_tensors(q, q, q, False)
    in_a_ring.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setattr(*where, in_a_ring)
    assert "context_parallel splits its sequences" in sdpa.why_not_tensors(q, q, q, False)
