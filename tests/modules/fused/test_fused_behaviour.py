"""LayerNormLinear and LayerNormMLP where they run: histories, precision, micro-batches, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_fp8.modules.weight_cache
from lightning_fp8 import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, fp8_autocast, fp8_state_dict
from lightning_fp8.modules.weight_cache import _KeptWeight
from lightning_fp8.numerics.recipes import make_recipe
from tests.modules.fused.cases import (
    distances,
    randomized,
    reference,
    rounding_of,
    sample,
    unrounded,
)
from tests.modules.fused.runs import MODULES, Make, all_equal, amaxes, input_of, run
from tests.small import assert_raises, update_all_scales


@MODULES
@pytest.mark.parametrize("calibrating", [False, True])
def test_rows_hold_what_is_cast(make: Make, calibrating: bool) -> None:
    module, x = randomized(make(32, 48)), input_of(20, 32)
    rounded = unrounded if calibrating else rounding_of("delayed")
    right, _ = reference(module, x, "gelu", rounded)
    gradient = torch.randn(20, 48 if make is LayerNormLinear else 32)
    with fp8_autocast(enabled=not calibrating, calibrating=calibrating):
        y = module(x)
        y.backward(gradient)
        seen = amaxes(module)
    last = "fc2." if make is LayerNormMLP else ""
    first = "fc1." if make is LayerNormMLP else ""
    assert list(seen) == [
        f"{of}{role}" for of in dict.fromkeys([first, last]) for role in ("input", "weight", "grad_output")
    ]
    assert seen[f"{first}input"] == pytest.approx(float(right["norm"].detach().abs().max()), rel=1e-5)
    assert seen[f"{last}grad_output"] == float(gradient.abs().max())
    for name, parameter in module.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            assert seen[name.replace("_", ".")] == float(parameter.detach().abs().max())
    if make is LayerNormMLP:
        h = right["norm"] @ module.fc1_weight.detach().double().t() + module.fc1_bias.detach()
        hidden = nn.functional.gelu(h, approximate="tanh").detach()
        assert seen["fc2.input"] == pytest.approx(float(hidden.abs().max()), rel=1e-5 if calibrating else 0.1)
        assert seen["fc1.grad_output"] > 0
    if calibrating:
        scales = fp8_state_dict(module)["scale"]
        assert bool((scales > 0).all())


@MODULES
def test_the_next_step_casts_by_the_scales_of_the_last(make: Make) -> None:
    """Scales of a larger input keep a smaller one within rounding, and are not those of its own amax."""
    recipe = make_recipe("delayed")
    module, x = randomized(make(32, 48)), input_of(20, 32)
    own = run(module, x, recipe=recipe)
    with torch.no_grad():
        module.layer_norm_weight.mul_(3.3)
    run(module, x, recipe=recipe)
    update_all_scales(recipe)
    with torch.no_grad():
        module.layer_norm_weight.div_(3.3)
    delayed = run(module, x, recipe=recipe)
    assert not torch.equal(delayed[0], own[0])
    torch.testing.assert_close(delayed[0], own[0], rtol=0.1, atol=0.1 * float(own[0].abs().max()))
    state = fp8_state_dict(module)
    assert bool((state["scale"] > 0).all())


@MODULES
def test_evaluation_observes_nothing(make: Make) -> None:
    module, x = make(32, 48), sample(4, 32)
    with fp8_autocast(), torch.no_grad():
        first = module(x)
    module.eval()
    run(module, x.requires_grad_())
    assert not any(amaxes(module).values())
    assert torch.equal(first, run(module, x)[0])


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_high_precision_is_the_norm_and_linear(norm: Any) -> None:
    parts = nn.Sequential(norm(32, eps=1e-3), Linear(32, 48)).bfloat16()
    module = LayerNormLinear(32, 48, eps=1e-3, normalization=norm.__name__, params_dtype=torch.bfloat16)
    names = dict(zip(module.state_dict(), parts.state_dict().values()))
    module.load_state_dict(names)
    x = input_of(5, 32, dtype=torch.bfloat16)
    right = run(module, x, enabled=False)
    leaf = x.detach().clone().requires_grad_()
    y = parts(leaf)
    assert torch.equal(y, right[0])
    module.fp8 = False
    assert all_equal(run(module, x), right)
    assert module.record.high_precision == 2


@MODULES
def test_torch_autocast_with_float32_weights(make: Make) -> None:
    module, x = randomized(make(64, 48, return_layernorm_output=True)), sample(20, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = distances(module, x, "gelu", rounding_of("rowwise"), fp8_recipe="rowwise")
        with fp8_autocast(fp8_recipe="rowwise"):
            y, normalized = module(x)
    assert (y.dtype, normalized.dtype) == (torch.bfloat16, torch.bfloat16)
    assert max(found.values()) < 0.05, found


@MODULES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(make: Make, dtype: torch.dtype) -> None:
    module, x = randomized(make(32, 48, params_dtype=torch.float32)), input_of(4, 32)
    right = run(module, x, recipe="tensorwise")
    torch.set_default_dtype(dtype)
    try:
        twin = make(32, 48, params_dtype=torch.float32)
        twin.load_state_dict(module.state_dict())
        assert all_equal(run(twin, x, recipe="tensorwise"), right)
        assert make(32, 48).layer_norm_weight.dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@MODULES
def test_frozen_parameters_change_no_other_gradient(make: Make) -> None:
    """Each needs another part of the backward pass."""
    module, x = randomized(make(32, 48)), input_of(20, 32)
    names = ["x", *(name for name, _ in module.named_parameters())]
    right = dict(zip(names, run(module, x)[1:]))
    for trained in [*([name] for name in names), names[:1] + names[3:4], names[1:3]]:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
        found = run(module, x.detach().requires_grad_("x" in trained))[1:]
        assert all_equal(found, [right[name] for name in names if name in trained]), trained


# --- Micro-batches ----------------------------------------------------------------------------------------------------


@MODULES
def test_micro_batches_share_the_cast_weights(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return _KeptWeight(*args, **kwargs)

    monkeypatch.setattr(lightning_fp8.modules.weight_cache, "_KeptWeight", counted)
    module, x = randomized(make(32, 48)), input_of(4, 32)
    right = run(module, x, recipe="tensorwise")
    weights = len(module.gemms)
    for first, casts in ((True, weights), (False, 0), (False, 0), (True, weights)):
        assert all_equal(run(module, x, first, recipe="tensorwise"), right)
        assert len(made) == casts
        made.clear()
    with torch.no_grad():
        getattr(module, module.weight_names[-1]).mul_(2.0)
    run(module, x, False, recipe="tensorwise")
    assert len(made) == 1


@MODULES
def test_wgrad_is_added_to_main_grad(make: Make) -> None:
    module = randomized(make(32, 48, fuse_wgrad_accumulation=True))
    twin, x = make(32, 48), input_of(20, 32)
    twin.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match="main_grad"):
        run(module, x)
    names = module.weight_names
    for name in names:
        getattr(module, name).main_grad = torch.full_like(getattr(module, name), 5.0)
    run(twin, x, True)
    for first in (True, False):
        run(module, x, first)
    for name in names:
        weight = getattr(module, name)
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 2 * getattr(twin, name).grad)


# --- Arguments --------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "parallel_mode": None,
    "set_parallel_mode": False,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "return_layernorm_output_gathered": False,
    "ub_bulk_wgrad": False,
    "ub_bulk_dgrad": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "name": None,
}


ALONE = ("sequence_parallel", "set_parallel_mode", "return_layernorm_output_gathered", "save_original_input")
"""Flags without effect where no ranks share a layer, and one that never has any."""
TAKEN = (*ALONE, "delay_wgrad_compute")


@pytest.mark.parametrize("make", [Linear, LayerNormLinear, LayerNormMLP])
def test_parallel_arguments_of_one_process(make: Make) -> None:
    assert isinstance(make(32, 48, **DEFAULTS), make)
    assert isinstance(make(32, 48, parallel_mode="column", **dict.fromkeys(ALONE, True)), make)
    flags = {name: True for name, default in DEFAULTS.items() if default is False and name not in TAKEN}
    for name, value in {"symmetric_ar_type": "two_shot", **flags}.items():
        with pytest.raises(NotImplementedError, match=f"^{name}=.* is not supported: .*leave it out"):
            make(32, 48, **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'tpsize'"):
        make(32, 48, tpsize=2)


@MODULES
def test_initialization(make: Make) -> None:
    torch.manual_seed(0)
    module = make(256, 256)
    weights = [getattr(module, name) for name in module.weight_names]
    for weight in weights:
        assert float(weight.detach().std()) == pytest.approx(0.023, rel=0.02)
    assert not any(getattr(module, name).any() for name in module.bias_names)
    assert torch.equal(module.layer_norm_weight, torch.ones(256))
    assert not module.layer_norm_bias.any()
    assert not make(32, 48, zero_centered_gamma=True).layer_norm_weight.any()
    forks: list[str] = []

    class Tracker:
        def fork(self, name: str = "model-parallel-rng") -> Any:
            forks.append(name)
            return torch.random.fork_rng()

    init: dict[str, Any] = {"init_method": lambda w: nn.init.constant_(w, 2.0)}
    if make is LayerNormMLP:
        init["output_layer_init_method"] = lambda w: nn.init.constant_(w, 3.0)
    module = make(8, 8, **init, get_rng_state_tracker=Tracker)
    assert [float(getattr(module, name).detach().mean()) for name in module.weight_names] == [2.0, 3.0][
        : len(module.gemms)
    ]
    assert forks == ["model-parallel-rng"] * len(module.gemms)


@MODULES
def test_wrong_arguments(make: Make) -> None:
    module = make(32, 48)
    wrong: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "must be a positive integer": (ValueError, lambda: make(0, 48)),
        "normalization='BatchNorm' is unknown; use one of 'LayerNorm', 'RMSNorm'": (
            ValueError,
            lambda: make(32, 48, normalization="BatchNorm"),
        ),
        "eps=-1.0 must be": (ValueError, lambda: make(32, 48, eps=-1.0)),
        "bias='yes' must be True or False": (TypeError, lambda: make(32, 48, bias="yes")),
        "init_method=3 must be a function": (TypeError, lambda: make(32, 48, init_method=3)),
        "params_dtype=torch.int8 is not supported": (TypeError, lambda: make(32, 48, params_dtype=torch.int8)),
        f"{make.__name__} takes a tensor, not list": (TypeError, lambda: module([1.0])),
        "but the input has shape": (ValueError, lambda: module(torch.randn(3, 31))),
        "cast one of them": (TypeError, lambda: module(torch.randn(3, 32).bfloat16())),
        "is_first_microbatch='no'": (TypeError, lambda: module(torch.randn(3, 32), is_first_microbatch="no")),
    }
    for message, (error, action) in wrong.items():
        assert_raises(action, error, message)
    if make is LayerNormMLP:
        assert_raises(
            lambda: make(32, 48, activation="elu"), ValueError, "activation='elu' is unknown; use one of 'gelu'"
        )
    else:
        assert_raises(lambda: module(torch.randn(3, 32), fp8_output=True), NotImplementedError, "fp8_output=True")
