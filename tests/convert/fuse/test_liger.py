"""Models that Liger-Kernel has patched: in each order of patching, norms and MLPs are ours, RoPE and the loss Liger's.

Liger's kernels do not run on the CPU; torch code stands in for their launches (``tests/convert/fuse/liger.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import FP8FabricPrecision, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.fused.mlp import FusedMLP
from lightning_fp8.convert.fused.norm import FusedNorm
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary
from tests.convert.fuse.liger import liger_on_the_cpu

transformers = pytest.importorskip("transformers")
try:
    from liger_kernel import transformers as liger
except ImportError as reason:  # also one that does not support this transformers
    pytest.skip(f"Liger-Kernel cannot be imported: {reason}", allow_module_level=True)

from transformers.models.gemma2 import modeling_gemma2  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

TOKENS = torch.arange(48).view(2, 24) % 37
ALL_BLOCKS = Policy(first_last_layers_bf16=False, fuse=True)
convert = partial(convert_module, first_last_layers_bf16=False, fuse=True)


class Family(NamedTuple):
    modeling: Any
    name: str
    apply: Callable[..., None]
    mlp: str
    """Liger's argument for the MLP."""


LLAMA = Family(modeling_llama, "Llama", liger.apply_liger_kernel_to_llama, "swiglu")
GEMMA = Family(modeling_gemma2, "Gemma2", liger.apply_liger_kernel_to_gemma2, "geglu")
families = pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=lambda family: family.name)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with liger_on_the_cpu(modeling_llama, modeling_gemma2):
        yield


def made(family: Family, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = getattr(transformers, f"{family.name}Config")(
        vocab_size=37,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = getattr(family.modeling, f"{family.name}ForCausalLM")(config).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def classes(family: Family, dtype: torch.dtype, **options: bool) -> Any:
    family.apply(**options)
    return convert(made(family, dtype))


def instances_before(family: Family, dtype: torch.dtype, **options: bool) -> Any:
    model = made(family, dtype)
    family.apply(model=model, **options)
    return convert(model)


def instances_after(family: Family, dtype: torch.dtype, **options: bool) -> Any:
    model = convert(made(family, dtype))
    family.apply(model=model, **options)
    return convert(model)


def classes_after(family: Family, dtype: torch.dtype, **options: bool) -> Any:
    """The norms and MLPs are those of transformers, as they were made."""
    model = convert(made(family, dtype))
    family.apply(**options)
    return convert(model)


ORDERS = [classes, instances_before, instances_after, classes_after]


def step(model: Any, enabled: bool = True) -> list[Tensor]:
    """The loss and all gradients of the second of two training steps with the same weights, and amaxes and scales."""
    for _ in range(2):
        model.zero_grad()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=enabled and model.dtype is torch.float32)
        with autocast, fp8_autocast(enabled):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
    state = [value for _, value in sorted(fp8_state_dict(model).items()) if isinstance(value, Tensor)]
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters()), *state]


def error(model: Any, found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of all gradients together."""
    last = 1 + len([*model.parameters()])
    pairs = [(one.double(), two.double()) for one, two in zip(found[1:last], exact[1:last])]
    difference = sum(float((one - two).square().sum()) for one, two in pairs)
    return float((difference / sum(float(two.square().sum()) for _, two in pairs)) ** 0.5)


def rows(summary: ConversionSummary) -> list[tuple[str, bool, str]]:
    return [(row.name, row.fp8, row.reason) for row in summary.rows]


def after_a_step(model: Any, policy: Policy = ALL_BLOCKS, patch: Callable[[], None] = lambda: None) -> Any:
    watch = FirstStep(model, plan_conversion(model, policy))
    patch()
    step(model)
    return watch.finish()


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_orders_end_in_the_same_state(family: Family, dtype: torch.dtype) -> None:
    """To the bit, amaxes too, that of a model of which Liger computes RoPE and the loss, and no norm and no MLP.

    The norms of Gemma round once, in Liger as in transformers, and Llama's twice.
    """
    exact = step(made(family, torch.float64), enabled=False)
    unfused = convert_module(made(family, dtype), first_last_layers_bf16=False)
    allowed = 1.15 * error(unfused, step(unfused), exact)
    expected_rows = expected = None
    for order in ORDERS:
        with liger_on_the_cpu(family.modeling):
            expected = expected or step(classes(family, dtype, rms_norm=False, **{family.mlp: False}))
        with liger_on_the_cpu(family.modeling):
            model = order(family, dtype)
            summary = after_a_step(model)
            found = step(model)
            fused = [*summary.norms, *summary.mlps]
            assert len(fused) == (4 if family is GEMMA else 2) * 2 + 1 + 2
            assert all(row.fp8 and row.ran for row in fused), f"{order}\n{summary}"
            expected_rows = expected_rows or rows(summary)
            assert rows(summary) == expected_rows
            assert error(model, found, exact) < allowed
            model = order(family, dtype)
            for one, two in zip(step(model), expected, strict=True):
                assert torch.equal(one, two), order


@families
def test_liger_alone_agrees_with_its_model(family: Family) -> None:
    """In float32, gradients of the patched model are the plain one's: the torch code for Liger's launches is right."""
    exact = step(made(family, torch.float64), enabled=False)
    plain = made(family, torch.float32)
    family.apply(model=plain)
    assert error(plain, step(plain, enabled=False), exact) < 1e-6


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_norms_in_all_casting_modes(mode: str, offset: float, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Output and both gradients: of Liger's formula, and of float64's within the rounding of x's dtype.

    In mode llama the output has the wider dtype, as of the norm of transformers that Liger replaces.
    """
    torch.manual_seed(0)
    norm = liger.LigerRMSNorm(64, eps=1e-5, offset=offset, casting_mode=mode, init_fn="zeros" if offset else "ones")
    with torch.no_grad():
        norm.weight.add_(torch.randn(64))
    norm.to(weight_dtype)
    x, dy = (torch.randn(6, 64).to(x_dtype).requires_grad_() for _ in range(2))

    def results(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        with fp8_autocast():
            y = module(x)
        y.backward(dy.detach().to(y.dtype, copy=True))  # which Liger writes over
        return [y.detach(), x.grad, module.weight.grad]  # type: ignore[list-item]

    fused = convert(nn.Sequential(copy.deepcopy(norm), nn.Linear(64, 64)))[0]
    assert isinstance(fused, FusedNorm)
    found, ligers = results(fused, x, dy), results(copy.deepcopy(norm), x, dy)
    assert fused.why_not == ""
    wider = torch.promote_types(x_dtype, weight_dtype)
    assert [each.dtype for each in found] == [wider if mode == "llama" else x_dtype, x_dtype, weight_dtype]
    wide = norm.weight.detach().double().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y64 = F.rms_norm(x64, (64,), eps=1e-5) * (wide + offset)
    y64.backward(dy.double())
    for one, other, exact in zip(found, ligers, (y64.detach(), x64.grad, wide.grad)):
        assert exact is not None
        scale = float(exact.abs().max())
        tolerance = 2 ** (-7 if torch.bfloat16 in (x_dtype, one.dtype) else -20) * scale
        torch.testing.assert_close(one.double(), exact, rtol=0, atol=tolerance)
        if mode != "none":  # which computes in x's dtype, where this kernel computes in float32
            torch.testing.assert_close(one, other, rtol=0, atol=2 * tolerance, check_dtype=False)


def test_what_is_not_known_stays_ligers() -> None:
    """An offset that is neither 0 nor 1, and a forward that calls Liger's."""

    class Twice(liger.LigerRMSNorm):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    norms = [liger.LigerRMSNorm(64, offset=0.5), Twice(64), liger.LigerRMSNorm(64)]
    model = convert(nn.Sequential(*norms, nn.Linear(64, 64)))
    assert [isinstance(each, FusedNorm) for each in model] == [False, False, True, False]
    other, *_ = plan_conversion(model, ALL_BLOCKS).summary.norms
    assert other.reason == "fuse=True does not support liger_kernel.transformers.rms_norm.LigerRMSNorm"


def test_norms_of_gemma4_whose_forward_wraps_the_kernel() -> None:
    """Those without a weight stay torch code."""
    if (norm := getattr(liger.rms_norm, "LigerRMSNormForGemma4", None)) is None:
        pytest.skip("this Liger-Kernel has no norm for Gemma 4")
    model = convert(nn.Sequential(norm(64), norm(64, with_scale=False), nn.Linear(64, 64)))
    assert [isinstance(each, FusedNorm) for each in model] == [True, False, False]


@pytest.mark.parametrize("family", [LLAMA], ids=["Llama"])
def test_instances_patched_after_the_conversion_are_named(family: Family) -> None:
    """Until the model is converted again, its norms and MLPs run in Liger's kernels, and the table says so."""
    model = convert(made(family))
    summary = after_a_step(model, patch=lambda: family.apply(model=model))
    fused = [*summary.norms, *summary.mlps]
    assert len(fused) == 2 * 2 + 1 + 2
    assert {(row.ran, row.reason) for row in fused} == {
        (False, "its forward was replaced on the instance after the conversion; convert it again to fuse it")
    }
    assert summary.elsewhere  # found after the step


def test_the_table_names_what_liger_computes() -> None:
    assert not plan_conversion(made(LLAMA), ALL_BLOCKS).summary.elsewhere
    expected = {
        (): "Liger-Kernel computes RoPE and the fused linear cross entropy, in high precision.",
        ("fused_linear_cross_entropy",): "Liger-Kernel computes RoPE, in high precision.",
        ("rope",): "Liger-Kernel computes the fused linear cross entropy, in high precision.",
        ("rope", "fused_linear_cross_entropy"): "",
    }
    for off, line in expected.items():
        with liger_on_the_cpu(modeling_llama):
            LLAMA.apply(**dict.fromkeys(off, False))
            for policy in (ALL_BLOCKS, Policy()):
                model = made(LLAMA)
                summary = plan_conversion(model, policy).summary
                assert "".join(summary.elsewhere) == line
                assert line in str(summary).replace("\n", " ")
                assert line in summary.table(verbose=True)
    LLAMA.apply(cross_entropy=True, fused_linear_cross_entropy=False)
    (line,) = plan_conversion(made(LLAMA), ALL_BLOCKS).summary.elsewhere
    assert line == "Liger-Kernel computes RoPE and cross entropy, in high precision."


@pytest.mark.parametrize("instance", [False, True])
def test_the_heads_row_says_that_liger_reads_its_weight(instance: bool) -> None:
    """Also of a head in FP8, which would run in FP8 in evaluation only; the loss of the first step is Liger's."""
    model = made(LLAMA)
    model.lm_head = lightning_fp8.Linear(64, 37, bias=False, dtype=torch.bfloat16)
    assert next(row for row in plan_conversion(model, ALL_BLOCKS).summary.layers if row.name == "lm_head").fp8
    LLAMA.apply(model=model) if instance else LLAMA.apply()
    convert(model)
    summary = after_a_step(model)
    row = next(row for row in summary.layers if row.name == "lm_head")
    assert (row.fp8, row.reason) == (
        False,
        "Liger's fused linear cross entropy reads its weight and does not call it in training",
    )
    assert not model.lm_head.fp8
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("instance", [False, True])
def test_outside_of_fp8_a_class_runs_ligers_forward_and_an_instance_its_own(instance: bool) -> None:
    """Which compute the same. MLPs of blocks in BF16 are left as they are."""
    if not instance:
        LLAMA.apply()
    model = made(LLAMA)
    if instance:
        LLAMA.apply(model=model)
    plain = copy.deepcopy(model.model.norm)
    norm = convert_module(model, num_layers_at_end_in_bf16=0, fuse=True).model.norm
    x = torch.randn(4, 64).bfloat16()
    for each in (norm, copy.deepcopy(norm)):
        assert isinstance(each, FusedNorm)
        assert torch.equal(each(x), plain(x))
        assert (each(x).grad_fn.name() == "LigerRMSNormFunctionBackward") is not instance
        with fp8_autocast():
            assert each(x[None])[0].grad_fn is not None
    assert model.model.layers[0].mlp.forward.__module__ == "liger_kernel.transformers.swiglu"
    assert isinstance(model.model.layers[1].mlp, FusedMLP)


def test_a_plugin_says_what_liger_computes(caplog: pytest.LogCaptureFixture) -> None:
    LLAMA.apply()
    plugin = FP8FabricPrecision(recipe="delayed", fuse=True, first_last_layers_bf16=False)
    plugin.convert_module(made(LLAMA))
    assert "RoPE" in str(plugin.summary)
