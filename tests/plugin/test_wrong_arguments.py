"""Arguments that were taken and meant something else: each is an error that says the value and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_fp8 as fp8
from lightning_fp8.delayed import history as histories
from lightning_fp8.numerics.formats import E4M3
from tests.float8_reference import cast
from tests.small import assert_raises, mlp

Case = tuple[Callable[[], Any], type[Exception], str]


def norms(name: str, error: type[Exception], message: str, **arguments: Any) -> dict[str, Case]:
    def make(norm: Any) -> Any:
        return norm(**{"normalized_shape": 4, **arguments})

    return {f"{norm.__name__} {name}": (partial(make, norm), error, message) for norm in (fp8.LayerNorm, fp8.RMSNorm)}


def converted() -> nn.Module:
    return fp8.convert_module(mlp())


def state_with(**entries: Any) -> Callable[[], Any]:
    return lambda: fp8.load_fp8_state_dict(converted(), {**fp8.fp8_state_dict(converted()), **entries})


def linear(**arguments: Any) -> Callable[[], Any]:
    return lambda: fp8.Linear(4, 4, **arguments)


def run(x: torch.Tensor) -> Any:
    with fp8.fp8_autocast():
        return fp8.Linear(4, 4)(x)


X = torch.ones(2, 4)
F16, BF16 = torch.float16, torch.bfloat16
CASES: dict[str, Case] = {
    # fp8_autocast
    "a recipe first": (lambda: fp8.fp8_autocast("blockwise"), TypeError, "enabled='blockwise'.*fp8_recipe='blockwise'"),
    "a recipe object first": (lambda: fp8.fp8_autocast(fp8.DelayedScaling()), TypeError, "fp8_recipe=DelayedScaling"),
    "a bare decorator": (lambda: fp8.fp8_autocast(lambda x: x), TypeError, "@fp8_autocast\\(\\)"),
    "enabled=1": (lambda: fp8.fp8_autocast(1), TypeError, "enabled=1"),
    "calibrating": (lambda: fp8.fp8_autocast(calibrating="false"), TypeError, "calibrating='false'.*without quotes"),
    "fp8_group": (lambda: fp8.fp8_autocast(fp8_group="world"), TypeError, "fp8_group='world'.*ProcessGroup.*None"),
    # names that are none: all that there are, and the nearest
    "exclude": (
        lambda: fp8.FP8Precision(exclude=["head"]),
        TypeError,
        "^FP8Precision has no argument 'exclude'; its arguments are 'recipe', .*'where_faster'; did you mean 'skip'",
    ),
    "in Fabric": (lambda: fp8.FP8FabricPrecision(fused=True), TypeError, "^FP8FabricPrecision .* did you mean 'fuse'"),
    "a near name": (lambda: fp8.FP8Precision(first_last_layer_bf16=False), TypeError, "mean 'first_last_layers_bf16'"),
    "of convert_module": (
        lambda: fp8.convert_module(mlp(), module_filter_fn=callable),
        TypeError,
        "^convert_module has no argument 'module_filter_fn'; .* did you mean 'skip'",
    ),
    "of a region": (lambda: fp8.fp8_autocast(recipe="delayed"), TypeError, "'enabled', .*; did you mean 'fp8_recipe'"),
    "of a recipe": (lambda: fp8.DelayedScaling(history_len=4), TypeError, "'margin', .* mean 'amax_history_len'"),
    "of rowwise": (lambda: fp8.Float8RowwiseScaling(margin=1), TypeError, "^Float8RowwiseScaling has no .* 'margin'"),
    "of a mapping": (lambda: fp8.FP8Precision({"history": 4}), ValueError, "no field 'history'.* 'amax_history_len'"),
    "of the monitor": (lambda: fp8.FP8Monitor(every=1), TypeError, "'per_layer', .*; did you mean 'every_n_steps'"),
    "nothing near": (lambda: fp8.FP8Precision(zzz=1), TypeError, "'where_faster'$"),
    # recipes
    "margin=200": (lambda: fp8.DelayedScaling(margin=200), ValueError, "margin=200 must be at most 18: E4M3"),
    "a history of 10**12": (
        lambda: fp8.DelayedScaling(amax_history_len=10**12),
        ValueError,
        "amax_history_len=1000000000000 must be at most 65536: .* 4 bytes for each step and tensor",
    ),
    "reduce_amax": (lambda: fp8.DelayedScaling(reduce_amax="false"), TypeError, "reduce_amax='false'"),
    "power_2_scale": (lambda: fp8.Float8CurrentScaling(power_2_scale="no"), TypeError, "power_2_scale='no'"),
    "blockwise power_2_scale": (lambda: fp8.Float8BlockScaling(power_2_scale=0), TypeError, "power_2_scale=0"),
    "amax_epsilon text": (lambda: fp8.Float8CurrentScaling(amax_epsilon="1"), TypeError, "amax_epsilon='1'.*number"),
    "amax_epsilon None": (lambda: fp8.Float8CurrentScaling(amax_epsilon=None), TypeError, "amax_epsilon=None.*number"),
    "amax_epsilon 1e39": (
        lambda: fp8.Float8CurrentScaling(amax_epsilon=1e39),
        ValueError,
        "1e\\+39.*at most 3.4e\\+38",
    ),
    "a class": (
        lambda: fp8.make_recipe(fp8.DelayedScaling),
        TypeError,
        "the class DelayedScaling; .*DelayedScaling\\(\\)",
    ),
    "a name that is no text": (lambda: fp8.make_recipe({"name": ["delayed"]}), ValueError, "'delayed'.*'mxfp8'"),
    "a format by name": (
        lambda: fp8.DelayedScaling(fp8_format="HYBRID"),
        TypeError,
        "lightning_fp8.Format; use one of F",
    ),
    "two formats": (lambda: fp8.make_recipe({"fp8": "hybrid", "fp8_format": "e4m3"}), ValueError, "'hybrid'.*'e4m3'"),
    "a format of another recipe": (
        lambda: fp8.make_recipe({"fp8_format": "mxfp8", "fp8_recipe": "delayed"}),
        ValueError,
        "'delayed'.*'mxfp8'",
    ),
    # convert_module and the plugins
    "convert None": (lambda: fp8.convert_module(None), TypeError, "convert_module takes.*NoneType"),
    "convert a file": (lambda: fp8.convert_module("a.ckpt"), TypeError, "str 'a.ckpt'; load the model"),
    "convert a class": (lambda: fp8.convert_module(nn.Linear), TypeError, "the class Linear; make one: Linear\\("),
    "first_last_layers_bf16": (
        lambda: fp8.convert_module(mlp(), first_last_layers_bf16="false"),
        TypeError,
        "first_last_layers_bf16='false' must be True or False",
    ),
    "replace_layers": (lambda: fp8.FP8Precision(replace_layers="false"), TypeError, "replace_layers='false'"),
    "skip None": (lambda: fp8.convert_module(mlp(), skip=None), TypeError, "skip=None.*sequence"),
    "skip used up": (lambda: fp8.convert_module(mlp(), skip=(x for x in "2")), TypeError, "generator.*sequence"),
    "weights_dtype": (
        lambda: fp8.FP8Precision(weights_dtype="bf17"),
        ValueError,
        "weights_dtype='bf17'.*torch.bfloat16",
    ),
    "compute_dtype": (lambda: fp8.FP8Precision(compute_dtype=""), ValueError, "compute_dtype="),
    "plugin converts None": (lambda: fp8.FP8FabricPrecision().convert_module(None), TypeError, "NoneType"),
    "plugin loads a file": (lambda: fp8.FP8Precision().load_state_dict("a.ckpt"), TypeError, "'a.ckpt'.*torch.load"),
    "plugin loads None": (lambda: fp8.FP8Precision().load_state_dict(None), TypeError, "state dict, not NoneType"),
    # states
    "state of None": (lambda: fp8.fp8_state_dict(None), TypeError, "fp8_state_dict takes.*NoneType"),
    "state into a file": (
        lambda: fp8.load_fp8_state_dict("a.ckpt", fp8.fp8_state_dict(converted())),
        TypeError,
        "str 'a.ckpt'; load the model",
    ),
    "state from a file": (lambda: fp8.load_fp8_state_dict(converted(), "a.ckpt"), ValueError, "not str; .*torch.load"),
    "a whole checkpoint": (
        lambda: fp8.load_fp8_state_dict(converted(), {"FP8Precision": {}, "state_dict": {}}),
        ValueError,
        "\\['names'.*Pass what is inside: state\\['FP8Precision'\\]",
    ),
    "the plugin's state": (
        lambda: fp8.load_fp8_state_dict(converted(), {"recipe": {}, "model": {}}),
        ValueError,
        "Pass what is inside: state\\['model'\\]",
    ),
    "another model's state": (
        state_with(names=[f"net.{name}" for name in fp8.fp8_state_dict(converted())["names"]]),
        ValueError,
        "'net.2.input'.*'2.input'",
    ),
    "a name twice": (state_with(names=["2.input"] * 6), ValueError, "'2.input' more than once"),
    # Transformer Engine's files
    "TE state from a file": (
        lambda: fp8.load_te_state_dict(mlp(), "a.pt"),
        TypeError,
        "state dict.*'a.pt'.*torch.load",
    ),
    "TE state into None": (lambda: fp8.load_te_state_dict(None, {}), TypeError, "NoneType"),
    "an empty TE state": (
        lambda: fp8.load_te_state_dict(mlp(), {}),
        ValueError,
        "the file lacks 0.bias, 0.weight, .* and 2 more; no key is the model's: pass its state dict",
    ),
    "TE strict": (
        lambda: fp8.load_te_state_dict(mlp(), mlp().state_dict(), strict="false"),
        TypeError,
        "strict='false'",
    ),
    "export None": (lambda: fp8.export_te_state_dict(None, "2.4"), TypeError, "export_te_state_dict takes.*NoneType"),
    "a version as a number": (lambda: fp8.export_te_state_dict(converted(), 2.4), TypeError, "version=2.4.*'2.4'.*1.1"),
    "a recipe without a state": (
        lambda: fp8.export_te_state_dict(converted(), "2.4", "blockwise"),
        ValueError,
        "'blockwise' has no state.*DelayedScaling",
    ),
    # Linear
    "parts of one name": (linear(parameters_split=["a", "a"]), ValueError, "\\['a'\\] more than once"),
    "parts of one key": (linear(parameters_split={"a_": 2, "a": 2}), ValueError, "\\['a'\\] more than once"),
    "negative rows": (linear(parameters_split={"a": 6, "b": -2}), ValueError, "'b': -2.*positive number of rows"),
    "no rows": (linear(parameters_split={"a": 4, "b": 0}), ValueError, "'b': 0.*positive number of rows"),
    "half a row": (linear(parameters_split={"a": 2.0, "b": 2.0}), ValueError, "2.0.*positive number of rows"),
    "a dot in a part": (linear(parameters_split=["a.b", "c"]), TypeError, "'a.b'.*no dots"),
    "parts without a name": (linear(parameters_split=["", "_"]), TypeError, "must be a sequence of names"),
    "a number of parts": (linear(parameters_split=2), TypeError, "parameters_split=2 must be a sequence of names"),
    "parts without an order": (linear(parameters_split={"a", "b"}), TypeError, "must be a sequence of names"),
    "bias": (linear(bias="false"), TypeError, "bias='false'"),
    "return_bias": (linear(return_bias="false"), TypeError, "return_bias='false'"),
    "fuse_wgrad_accumulation": (linear(fuse_wgrad_accumulation="no"), TypeError, "fuse_wgrad_accumulation='no'"),
    "init_method": (linear(init_method="normal"), TypeError, "init_method='normal'.*function"),
    "a dtype by name": (linear(dtype="bfloat16"), TypeError, "dtype='bfloat16'.*torch.bfloat16"),
    "two dtypes": (linear(params_dtype=F16, dtype=BF16), ValueError, "torch.float16.*torch.bfloat16.*same argument"),
    "no input": (lambda: fp8.Linear(4, 4)(None), TypeError, "takes a tensor, not NoneType"),
    "a sparse input": (lambda: run(torch.ones(2, 4).to_sparse()), TypeError, "does not support sparse.*to_dense"),
    "a jagged input": (lambda: run(torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)), TypeError, "dense"),
    # norms
    **norms("eps None", TypeError, "eps=None must be a number", eps=None),
    **norms("eps text", TypeError, "eps='1e-5' must be a number", eps="1e-5"),
    **norms("eps True", TypeError, "eps=True must be a number", eps=True),
    **norms("eps inf", ValueError, "eps=inf must be a finite number", eps=float("inf")),
    **norms("zero_centered_gamma", TypeError, "zero_centered_gamma='false'", zero_centered_gamma="false"),
    **norms("elementwise_affine", TypeError, "elementwise_affine='false'", elementwise_affine="false"),
    **norms("without gamma", ValueError, "no gamma", zero_centered_gamma=True, elementwise_affine=False),
    **norms("two sizes", ValueError, "=4.*=8.*same argument", hidden_size=8),
    **norms("a flag as size", ValueError, "\\[True\\].*positive integer", normalized_shape=True),
    **norms("a fraction as size", ValueError, "\\[4.0\\].*positive integer", normalized_shape=4.0),
    **norms("text as size", ValueError, "\\['44'\\].*positive integer", normalized_shape="44"),
    **norms("an integer dtype", TypeError, "dtype=torch.int8.*torch.bfloat16", dtype=torch.int8),
    **norms("two dtypes", ValueError, "same argument", params_dtype=F16, dtype=BF16),
    "norm of nothing": (lambda: fp8.RMSNorm(4)(None), TypeError, "RMSNorm takes a tensor, not NoneType"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments(case: str) -> None:
    assert_raises(*CASES[case])


def test_a_refused_state_changes_nothing() -> None:
    model = converted()
    fp8.load_fp8_state_dict(model, {**fp8.fp8_state_dict(model), "scale": torch.full((6,), 3.0)})
    before = fp8.fp8_state_dict(model)
    with pytest.raises(ValueError, match="no name in the state"):
        fp8.load_fp8_state_dict(model, {**before, "names": list("abcdef")})
    assert torch.equal(fp8.fp8_state_dict(model)["scale"], before["scale"])
    assert (before["scale"] == 3).all()


def test_the_largest_margin_keeps_the_largest_value_and_one_more_would_not() -> None:
    """At margin m a tensor's largest value is cast as ``448 / 2**m``."""
    code = cast(torch.tensor([E4M3.max]).double().numpy(), 2.0**-18, "E4M3")
    assert code[0] != 0
    assert cast(torch.tensor([E4M3.max]).double().numpy(), 2.0**-19, "E4M3")[0] == 0
    fp8.DelayedScaling(margin=18)


def test_the_longest_history_is_taken() -> None:
    assert fp8.make_recipe({"amax_history_len": 65536}).amax_history_len == 65536  # type: ignore[union-attr]


def test_a_recipe_for_export_may_be_a_name() -> None:
    by_name, by_object = (fp8.export_te_state_dict(converted(), "2.4", r) for r in ("delayed", fp8.DelayedScaling()))
    assert by_name.keys() == by_object.keys()


def test_a_linear_of_parts_prints() -> None:
    assert "in_features=4, out_features=6, bias=True, fp8=True" in repr(fp8.Linear(4, 6, parameters_split=["a", "b"]))
    assert "bias=False" in repr(fp8.Linear(4, 6, bias=False, parameters_split=["a", "b"]))


def test_norms_of_float64_compute_in_it() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    for ours, torchs in ((fp8.LayerNorm, nn.LayerNorm), (fp8.RMSNorm, nn.RMSNorm)):
        expected = torchs(4, eps=1e-5, dtype=torch.float64)(x)
        torch.testing.assert_close(ours(4, eps=1e-5, dtype=torch.float64)(x), expected, rtol=1e-14, atol=1e-14)


def test_a_model_that_stays_in_bf16_is_said_so() -> None:
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8.*first_last_layers_bf16=False.*\n.*layer"):
        fp8.convert_module(nn.Linear(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8.convert_module(nn.Linear(16, 16), first_last_layers_bf16=False)


def test_a_region_without_fp8_layers_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "_references", [])  # other tests' models may still be there
    with pytest.warns(UserWarning, match=r"ran nothing in FP8.*convert_module\(model\)"), fp8.fp8_autocast():
        nn.Linear(4, 4)(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fp8.fp8_autocast(enabled=False):
            nn.Linear(4, 4)(X)
        with fp8.fp8_autocast():
            layer = fp8.Linear(4, 4)
            layer(X)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_sizes_may_be_numpys(kind: type) -> None:
    linear = fp8.Linear(kind(16), kind(32))
    assert linear.weight.shape == (32, 16)
    assert (type(linear.in_features), type(linear.out_features)) == (int, int)
    assert fp8.LayerNorm(kind(16)).normalized_shape == fp8.RMSNorm((kind(16),)).normalized_shape == (16,)
    for wrong in (kind(0), np.float32(16), np.bool_(True)):
        with pytest.raises(ValueError, match="positive integer"):
            fp8.Linear(wrong, 32)
        with pytest.raises(ValueError, match="positive integer"):
            fp8.LayerNorm(wrong)
