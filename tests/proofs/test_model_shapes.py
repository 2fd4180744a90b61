"""The look at the first two steps: right numbers pass, planted wrong ones stop training before a parameter changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from cuda_kernels.host import launch, proofs
from cuda_kernels.host.cache_folder import CARRIED_VARIABLE
from lightning_fp8 import FP8Callback, FP8FabricPrecision, FP8Precision
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import Outputs, quantize_columns_op, quantize_op, reference_quantize
from lightning_fp8.ops.gemm import Gemm, reference_gemm, scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.grouped import quantize_experts_op
from lightning_fp8.proofs import casts, model_shapes
from lightning_fp8.proofs.comparing import WrongResult, reference_of
from lightning_fp8.proofs.model_shapes import CHECKS, CheckedCalls, WrongNumbers
from lightning_fp8.proofs.products import operand
from tests.cuda_kernels.cases.gemm_cases import PAIRS
from tests.cuda_kernels.emulated import needs_compilers
from tests.host.card import Card
from tests.proofs.emulated_card import BROKEN, FaultyEmulator, emulated_card
from tests.small import quiet_trainer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.code)


# --- What is compared -------------------------------------------------------------------------------------------------


def hostile(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = (torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    x[1, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-40])
    x[-2] = 0
    return x


def looked_at(op: Any, args: tuple[Any, ...], change: Callable[[Any], object] = lambda results: None) -> bool:
    """Whether results of the specification pass, once ``change`` has changed them in place."""
    check = CHECKS[op](*args)
    results = reference_of(op)(*args)
    change(results)
    try:
        check(results)
    except WrongResult:
        return False
    return True


def flipped(codes: Tensor, *place: int) -> None:
    codes.view(torch.uint8)[place] ^= 1


@LAYOUTS
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(300, 203), (128, 256), (5, 7)])
def test_the_specification_passes_and_one_wrong_code_or_scale_does_not(
    layout: Layout, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, cast = hostile(*shape, dtype), Cast(E4M3, layout, columnwise=True)
    args = x, cast, None, None
    assert looked_at(quantize_op, args)
    assert looked_at(quantize_op, (x, cast.usage(False, True), None, None))
    places = {(0, 0), (shape[0] - 1, shape[1] - 1)}
    for row, column in places:
        assert not looked_at(quantize_op, args, lambda made, at=(row, column): flipped(made.data, *at))
        assert not looked_at(quantize_op, args, lambda made, at=(column, row): flipped(made.data_t, *at))

    def doubled(scale_inv: Tensor) -> None:
        if scale_inv.dtype == FP32:
            scale_inv.view(-1)[-1:] *= 2
        else:
            scale_inv.view(torch.uint8).view(-1)[-1] += 1

    assert not looked_at(quantize_op, args, lambda made: doubled(made.scale_inv))
    if not layout.has_one_scale:
        assert not looked_at(quantize_op, args, lambda made: doubled(made.scale_inv_t))


@LAYOUTS
def test_the_last_expert(layout: Layout) -> None:
    cast = Cast(E4M3, layout, columnwise=True)
    args = hostile(300, 203, BF16).unflatten(0, (2, 150)), cast, None, None
    assert looked_at(quantize_experts_op, args)
    assert looked_at(quantize_experts_op, (args[0], cast.usage(False, True), None, None))
    assert not looked_at(quantize_experts_op, args, lambda made: flipped(made.data, 1, 149, 202))
    assert not looked_at(quantize_experts_op, args, lambda made: flipped(made.data_t, 1, 202, 149))
    assert not looked_at(quantize_experts_op, args, lambda made: made.scale_inv.view(-1).view(torch.uint8).fill_(1))


@pytest.mark.parametrize("known", [False, True])
def test_a_given_scale_and_its_amax(known: bool) -> None:
    x, cast = torch.randn(40, 50).bfloat16(), Cast(E5M2, Layout.TENSOR).usage(True, True, known)
    for scale in (3.0,) if known else (3.0, 0.0):
        amax = torch.tensor(0.5)
        assert looked_at(quantize_op, (x, cast, torch.tensor(scale), amax))
        assert not looked_at(quantize_op, (x, cast, torch.tensor(scale), amax), lambda _, amax=amax: amax.mul_(2))
    assert looked_at(quantize_op, (x, Cast(E4M3, Layout.TENSOR, True, 10.0), None, None))
    observing = x, cast.usage(False, False, known), torch.tensor(3.0), torch.tensor(0.5)
    assert looked_at(quantize_op, observing)
    assert not looked_at(quantize_op, observing, lambda made: made.scale_inv.mul_(2))


def test_columns_with_given_scales() -> None:
    args = hostile(300, 50, BF16), torch.logspace(-2, 2, 50), E4M3.dtype
    assert looked_at(quantize_columns_op, args)
    assert not looked_at(quantize_columns_op, args, lambda codes: flipped(codes, 299, 49))


@pytest.mark.parametrize("scaling", PAIRS)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("same_sign", [False, True])
def test_a_product_passes_and_a_wrong_row_does_not(scaling: str, out_dtype: torch.dtype, same_sign: bool) -> None:
    values = [torch.randn(rows, 400) for rows in (300, 140)]
    a, b = (
        operand(each.abs() if same_sign else each, E4M3.dtype, layout, False)
        for each, layout in zip(values, PAIRS[scaling])
    )
    gemm = Gemm(*PAIRS[scaling], out_dtype, True)
    args = a.data, a.scale_inv, b.data, b.scale_inv, gemm, torch.randn(140)
    assert looked_at(scaled_mm_op, args)

    def off(row: int, by: float) -> Callable[[Tensor], object]:
        return lambda result: result[row].mul_(by)

    assert looked_at(scaled_mm_op, args, off(299, 1.01))  # as a short accumulator may be
    assert not looked_at(scaled_mm_op, args, off(299, 1.1))
    assert not looked_at(scaled_mm_op, args, off(0, torch.nan))
    assert not looked_at(scaled_mm_op, args, lambda result: result.copy_(result.roll(1, 0)))
    assert not looked_at(scaled_mm_op, args, lambda result: result[-20:, -20:].zero_())


def test_a_product_that_is_added() -> None:
    a, b = (operand(torch.randn(rows, 200), E4M3.dtype, Layout.TENSOR, False) for rows in (150, 30))
    args = torch.randn(150, 30), a.data, a.scale_inv, b.data, b.scale_inv, Gemm(Layout.TENSOR, Layout.TENSOR, FP32)
    assert looked_at(scaled_mm_accumulate_op, args)
    check = CHECKS[scaled_mm_accumulate_op](*args)
    with pytest.raises(WrongResult):  # nothing was added
        check(None)


def test_numbers_that_the_results_dtype_has_not() -> None:
    """Sums beyond float16 are inf there, and NaN in is NaN out."""
    a, b = (operand(torch.full((20, 64), 300.0), E4M3.dtype, Layout.TENSOR, False) for _ in range(2))
    gemm = Gemm(Layout.TENSOR, Layout.TENSOR, FP16)
    args = a.data, a.scale_inv, b.data, b.scale_inv, gemm, None
    assert reference_of(scaled_mm_op)(*args).isinf().all()
    assert looked_at(scaled_mm_op, args)
    a.data.view(torch.uint8)[3] = 0x7F
    assert looked_at(scaled_mm_op, args)
    assert not looked_at(scaled_mm_op, args, lambda result: result[3].zero_())


# --- In training ------------------------------------------------------------------------------------------------------


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).float().square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(40, 32), 8)  # type: ignore[arg-type]


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], CheckedCalls]]:
    """Begins to look at what runs on the CPU, as a process does with the first training step on a card."""
    begun: list[CheckedCalls] = []

    def begin() -> CheckedCalls:
        for each in begun:
            each.end()
        begun.append(CheckedCalls("cpu"))
        monkeypatch.setattr(model_shapes, "_calls", begun[-1])
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


def fit(model: Model, recipe: Any = "delayed", **options: Any) -> None:
    plugin = FP8Precision(recipe, first_last_layers_bf16=False)
    quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()], max_epochs=1, **options).fit(model)


def wrong_gradients(*args: Any) -> Outputs:
    """A cast whose E5M2 codes are wrong in the last row."""
    results = reference_quantize(*args)
    if args[1].float8 is E5M2:
        results.data.view(torch.uint8)[-1] ^= 1
    return results


def test_right_numbers_train_as_without_a_look(looking: Callable[[], CheckedCalls]) -> None:
    expected, model = Model(), Model()
    torch.manual_seed(1)
    fit(expected)
    before = dict(quantize_op.implementations), dict(scaled_mm_op.implementations), dict(quantize_op.plans)
    calls = looking()
    torch.manual_seed(1)
    fit(model)
    assert len(calls._seen) >= 5  # casts forward and backward, products of three kinds
    after = dict(quantize_op.implementations), dict(scaled_mm_op.implementations), dict(quantize_op.plans)
    assert after == before
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_wrong_numbers_stop_a_trainer_before_a_parameter_changes(
    accumulate: int, looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantize_op.implementations, "cpu", wrong_gradients)
    looking()
    model = Model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    message = (
        r"training is stopped in this call: quantize of \[8, 32\] by compiled plain torch.* on cpu"
        r".*TORCH_COMPILE_DISABLE=1"
    )
    with pytest.raises(WrongNumbers, match=message):
        fit(model, accumulate_grad_batches=accumulate)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before))
    assert quantize_op.implementations["cpu"] is wrong_gradients


def test_a_product_is_named_with_its_layers(
    looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scaled_mm_op.implementations, "cpu", lambda *args: reference_gemm(*args).neg_())
    looking()
    layers = r"parameters of these shapes: blocks\.0\.0\.weight, blocks\.0\.2\.weight, blocks\.1\.0\.weight and 3 more"
    with pytest.raises(WrongNumbers, match=rf"scaled_mm of \[8, 32\] by \[48, 32\] by torch\._scaled_mm.*{layers}"):
        fit(Model(), "rowwise")


def test_wrong_numbers_stop_fabric(looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantize_op.implementations, "cpu", wrong_gradients)
    looking()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[FP8FabricPrecision(first_last_layers_bf16=False)])
    model = fabric.setup(Model())
    with pytest.raises(WrongNumbers, match="quantize of"):
        model(torch.randn(8, 32)).float().square().mean().backward()


def test_steps_of_a_backward_pass_end_before_a_wrong_one(
    looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantize_op.implementations, "cpu", wrong_gradients)
    looking()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[FP8FabricPrecision(first_last_layers_bf16=False)])
    model = fabric.setup(plain := Model())
    for parameter in plain.parameters():
        each = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, each=each: each.step())
    before = plain.blocks[0][0].weight.detach().clone()
    with pytest.raises(WrongNumbers, match=r"quantize of \[8, 32\]"):
        model(torch.randn(8, 32)).float().square().mean().backward()
    assert torch.equal(plain.blocks[0][0].weight, before)


@pytest.mark.parametrize("steps_of_a_batch", [1, 3])
def test_the_checks_end_with_the_third_step(steps_of_a_batch: int, looking: Callable[[], CheckedCalls]) -> None:
    """Steps of several optimizers between two forwards are one."""
    before, calls = dict(quantize_op.implementations), looking()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[FP8FabricPrecision(first_last_layers_bf16=False)])
    model = fabric.setup(plain := Model())
    optimizers = [torch.optim.SGD(plain.parameters(), 0.1) for _ in range(steps_of_a_batch)]
    for batch in range(3):
        for _ in range(2):  # micro-batches
            model(torch.randn(8, 32)).float().square().mean().backward()
            assert (quantize_op.implementations != before) == (batch < 2)
            calls._seen.clear()
        for each in optimizers:
            each.step()


def test_what_cannot_be_looked_at_stops_nothing(
    looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Outputs:
        raise torch.OutOfMemoryError("no memory")

    looking()
    monkeypatch.setattr(casts, "reference_quantize", full)
    x, cast = torch.randn(40, 32), Cast(E4M3, Layout.ROW)
    with pytest.warns(RuntimeWarning, match="the first quantize of its kind was not checked: no memory"):
        results = quantize_op(x, cast, None, None)
    assert results[0].shape == x.shape


def test_evaluations_and_inference_are_not_looked_at(looking: Callable[[], CheckedCalls]) -> None:
    calls, model = looking(), Model()
    plugin = FP8Precision("tensorwise", first_last_layers_bf16=False)
    plugin.convert_module(model)
    with plugin.val_step_context(), torch.no_grad():
        model(torch.randn(8, 32))
    with plugin.forward_context(), torch.inference_mode():
        model(torch.randn(8, 32))
    assert not calls._seen
    with plugin.forward_context():
        model(torch.randn(8, 32))
    assert calls._seen


@needs_compilers
def test_a_kernel_loses_its_proof(
    tmp_path: Path, looking: Callable[[], CheckedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was right when it was proven."""
    monkeypatch.delenv(proofs.VARIABLE, raising=False)
    x, cast = torch.randn(40, 32).bfloat16(), Cast(E5M2, Layout.TENSOR, columnwise=True)
    with (
        patch.dict(quantize_op.implementations, cpu=quantize_op.implementations["cuda"]),
        emulated_card("none", tmp_path),
    ):
        looking()
        quantize_op(x, cast, None, None)
        looking()
        launch.EXECUTORS["cpu"] = FaultyEmulator("wrong numbers")
        with pytest.raises(WrongNumbers, match=rf"{BROKEN.pattern} on cpu; LIGHTNING_FP8_KERNELS=off continues"):
            quantize_op(x, cast, None, None)
    verdicts = [json.loads(path.read_text()) for path in (tmp_path / "proofs").glob("*.json")]
    (refused,) = [each for each in verdicts if BROKEN.fullmatch(each["kernel"])]
    assert not refused["proven"]
    assert refused["reason"] == "quantize of [40, 32] gave wrong numbers in training"


def test_a_process_without_a_card_never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "_begun", False)
    model_shapes.begin((), 0)
    assert model_shapes._calls is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(proofs.VARIABLE, "0")
    model_shapes.begin((), 0)
    assert model_shapes._calls is None


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    assert launch.architecture(0) == "90a"
    launch.architecture.cache_clear()
    monkeypatch.setenv(CARRIED_VARIABLE, "off")
    with pytest.raises(launch.NoKernels, match="LIGHTNING_FP8_KERNELS=off"):
        launch.architecture(0)


@pytest.fixture(autouse=True)
def _unplanned() -> Iterator[None]:
    plans.clear_plan_cache()
    yield
    plans.clear_plan_cache()
