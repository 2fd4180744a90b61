"""Modules that are cut over two ranks by Transformer Engine's arguments, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_fp8 import LayerNormMLP, MultiheadAttention, TransformerLayer
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.te_checkpoints.tensor_parallel import join_tensor_parallel, split_tensor_parallel
from tests.distributed.launch import run_on_two_ranks
from tests.distributed.scripts.te_parallel import BATCH, HIDDEN, SEQUENCE
from tests.tiers import thorough

ONE_SCALE = ("delayed", "tensorwise")
TENSOR = SEQUENCE * BATCH * HIDDEN
"""Elements of a whole activation."""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("te_parallel")
    return run_on_two_ranks("te_parallel", str(folder), "few", folder=folder)


def layers(reports: Any) -> Iterator[tuple[str, list[Any]]]:
    for case in reports[0]:
        if case.count(" ") >= 2:
            yield case, [report[case] for report in reports]


def check_layers(reports: Any) -> None:
    assert len([*layers(reports)]) >= 4
    for case, both in layers(reports):
        recipe = case.split(" ")[-2]
        for report in both:
            assert report["begins"], case  # the same seed gives pieces of the same weights
            assert report["back"], case  # and its checkpoint is one process's
            assert report["names"], case
            assert max(report["y dx"]) < 5e-3, case
            for name, (differs, error, of_one_process) in report["gradients"].items():
                if recipe == "bf16":
                    assert differs < 1e-2, (case, name)
                else:
                    flips = 0.05 if "_norm." in name else 0.02  # roundings that differ: 16 numbers have more noise
                    assert error < 1.05 * of_one_process + flips, (case, name)
        scales, others = (report["scales"] for report in both)
        if recipe == "delayed":
            assert scales == others, case
            assert scales == pytest.approx(both[0]["whole scales"], rel=0.1), case


def test_a_transformer_layer_of_two_ranks_is_that_of_one(few: Any) -> None:
    check_layers(few)


@thorough
def test_every_layer_and_recipe(tmp_path: Any) -> None:
    check_layers(run_on_two_ranks("te_parallel", str(tmp_path), "all", folder=tmp_path))


def test_modules_of_two_ranks_are_those_of_one(few: Any) -> None:
    for report in few:
        for case, errors in report["modules"].items():
            assert max(errors) < (0.1 if "delayed" in case else 6e-3), case


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_what_a_layer_sends(recipe: str, few: Any) -> None:
    """Of the norms' two gradients aside: four gathers and four sums; FP8 gathers x of column layers twice."""
    for report in few:
        traffic = report["traffic"][recipe]
        gathered, summed = traffic["bytes"]["gather"] * 2, traffic["bytes"]["scatter"]
        assert summed == 4 * 2 * TENSOR
        assert traffic["calls"]["scatter"] == 4
        if recipe == "bf16":
            assert gathered == 4 * 2 * TENSOR
        elif recipe in ONE_SCALE:
            assert gathered == 6 * TENSOR
        norms = 2 * 4 * HIDDEN
        amaxes = 4 * 4 if recipe == "tensorwise" else 0
        assert traffic["bytes"]["sum"] == norms + amaxes


@pytest.mark.parametrize("name", ["column", "row", "normed", "mlp"])
def test_what_works_of_one_process_works(name: str, few: Any) -> None:
    """main_grad and micro-batches are asserted in the script."""
    for report in few:
        behaviour = report["behaviour"]
        assert all(behaviour[f"{name} observed"].values())
        assert behaviour[f"{name} reset"]
        assert behaviour[f"{name} attributes"] == [True, int(name == "row"), 1]
        assert not any(behaviour[f"{name} marked"])
        assert behaviour[f"{name} copies"] == [True, True, True]
        assert behaviour[f"{name} second"]


def test_what_else_ranks_share(few: Any) -> None:
    for report in few:
        behaviour = report["behaviour"]
        assert max(behaviour["gathered norm"]) < 1e-5
        assert behaviour["alibi"] < 1e-6
        assert behaviour["norm"] < 1e-6
        assert behaviour["loads"] == [True, True]
        assert behaviour["alone"] == [None, []]
        assert behaviour["not cut"] == [6, 8]
    assert few[0]["behaviour"]["tracked"] != few[1]["behaviour"]["tracked"]
    assert all("tp_size=2 without tp_group" in warning for warning in few[0]["behaviour"]["warned"])
    assert few[0]["behaviour"]["warned"]


ERRORS = {
    "no group": "a layer of tp_size=2 has no process group: call set_tensor_parallel_group",
    "no group to load": "a layer of tp_size=2 has no process group: call set_tensor_parallel_group",
    "features": "in_features=97 does not divide into tp_size=2 equal parts",
    "heads": "num_attention_heads=3 does not divide into tp_size=2 equal parts",
    "ffn": "ffn_hidden_size=33 does not divide into tp_size=2 equal parts",
    "parts": "a_weight [3, 32]: its rows are sharded over tp_size=2, and 3 does not divide",
    "size": "tp_size=4, but tp_group has 2 ranks",
    "sequence alone": "sequence_parallel=True needs parallel_mode=",
    "no set_parallel_mode": "needs set_parallel_mode=True",
    "row of a norm": "parallel_mode='row' of LayerNormLinear is not supported: its norm needs all input features",
    "drop path": "drop_path_rate=0.1 with sequence_parallel=True is not supported",
    "rows": "a sequence of 3 does not divide into 2 pieces",
    "norm": "call set_tensor_parallel_group(tp_group) first",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_way_out(case: str, few: Any) -> None:
    for report in few:
        assert report["behaviour"]["errors"].keys() == ERRORS.keys()
        assert ERRORS[case] in report["behaviour"]["errors"][case]


@pytest.mark.parametrize(("dim", "sections"), [(0, 1), (0, 2), (1, 1), (0, (6, 2, 4))])
def test_pieces_and_wholes(dim: int, sections: Any) -> None:
    whole = torch.arange(48.0).view(12, 4)
    cut = Cut(dim, sections)
    pieces = [cut.piece(whole, rank, 2) for rank in range(2)]
    assert torch.equal(cut.join(pieces), whole)
    assert {cut.whole_shape(each.shape, 2) for each in pieces} == {whole.shape}
    if sections == (6, 2, 4):
        assert pieces[0][:, 0].tolist() == [0, 4, 8, 24, 32, 36]


@pytest.mark.filterwarnings("ignore:tp_size=2 without tp_group")
def test_files_of_ranks_and_of_one_process() -> None:
    """Without any process group: as many state dicts as ranks make one process's, and the other way round."""
    options: dict[str, Any] = {"activation": "swiglu", "fuse_qkv_params": True, "qkv_weight_interleaved": False}
    one = TransformerLayer(32, 64, 4, **options)
    cut = TransformerLayer(32, 64, 4, **options, tp_size=2, set_parallel_mode=True)
    whole = one.state_dict()
    pieces = [split_tensor_parallel(cut, whole, rank) for rank in range(2)]
    for piece in pieces:
        cut.load_state_dict(piece)
    assert torch.equal(
        pieces[1]["layernorm_mlp.fc1_weight"],
        torch.cat([whole["layernorm_mlp.fc1_weight"][at : at + 32] for at in (32, 96)]),
    )
    joined = join_tensor_parallel(cut, pieces)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[key], whole[key]) for key in whole)
    with pytest.raises(ValueError, match="3 state dicts for a model of tp_size=2; give one of each rank"):
        join_tensor_parallel(cut, [*pieces, pieces[0]])


def test_one_process_takes_no_notice() -> None:
    """Megatron passes these always."""
    options: dict[str, Any] = {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 1}
    x = torch.randn(4, 2, 32)
    for make in (LayerNormMLP, MultiheadAttention):
        torch.manual_seed(0)
        one = make(32, 4)
        torch.manual_seed(0)
        other = make(32, 4, **options)
        assert torch.equal(one.eval()(x), other.eval()(x))
