"""``skip``: functions and globs; a glob that matches nothing is an error that names what was perhaps meant."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fp8 import FP8FabricPrecision, FP8Precision, Linear, convert_module
from lightning_fp8.convert.policy import globs_of_nothing
from tests.small import Regression, mlp


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4))
        self.lm_head = nn.Linear(16, 64)


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        (
            "lm_haed",
            r"skip='lm_haed' matches no module of the model; globs match whole.*, and near it are 'lm_head'$",
        ),
        ("*.lm_head", r"matches no module.*near it are 'lm_head'"),
        ("head", r"matches no module.*near it are 'lm_head'"),
        (r"blocks\.1\..*", r"matches no module.*near it are 'blocks\.1\.0'"),
        ("blocks.1", r"skip='blocks\.1' matches 'blocks\.1', but no layer in it; write 'blocks\.1\.\*'"),
        ("blocks", r"skip='blocks' matches 'blocks', but no layer in it; write 'blocks\.\*'"),
        ("", r"skip='' matches no module.*layers are called 'blocks\.0\.0'"),
        ("BLOCKS.1.0", r"matches no module"),
    ],
)
def test_a_glob_of_nothing_is_refused(glob: str, message: str) -> None:
    model = Decoder()
    with pytest.raises(ValueError, match=message):
        convert_module(model, skip=("blocks.2.*", glob))
    assert all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("glob", ["lm_head", "*.2.0", "blocks.1.*", "*.1.1", "*"])
def test_a_glob_of_something_is_not(glob: str) -> None:
    """``*.1.1`` is a norm, which runs in high precision anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        convert_module(Decoder(), first_last_layers_bf16=False, skip=(glob,))


@pytest.mark.parametrize("glob", ["alias", "al*", "twin.0"])
def test_a_module_may_be_named_by_any_of_its_names(glob: str) -> None:
    model = Decoder()
    model.alias, model.twin = model.blocks[1][0], model.blocks[1]
    convert_module(model, first_last_layers_bf16=False, skip=(glob,))
    assert [isinstance(block[0], Linear) for block in model.blocks] == [True, False, True, True]


def test_a_model_without_layers_is_said_so() -> None:
    assert globs_of_nothing(["a"], [], []) == [
        "skip='a' matches no module of the model; it has no layer that could run in FP8"
    ]


def test_names_are_those_without_wrappers() -> None:
    inner = mlp()
    convert_module(nn.Sequential(torch.compile(inner), mlp()), first_last_layers_bf16=False, skip=("0.2", "1.*"))
    assert [type(inner[2]), type(inner[4])] == [nn.Linear, Linear]


def test_the_trainers_plugin_refuses_and_fabrics_warns() -> None:
    """Models that share Fabric's plugin share its globs: one of them may have the module."""
    with pytest.raises(MisconfigurationException, match="skip='net.7' matches no module"):
        FP8Precision(skip=("net.7",)).convert_module(Regression())
    plugin = FP8FabricPrecision(skip=("net.2",))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plugin.convert_module(Regression())
    with pytest.warns(UserWarning, match="skip='net.2' matches no module.*near it are '2'"):
        plugin.convert_module(mlp())


# --- Functions --------------------------------------------------------------------------------------------------------


def wide(module: nn.Module, name: str) -> bool:
    """The layers of :func:`tests.small.mlp` that take 32 features, but the one called ``2``."""
    return getattr(module, "in_features", 0) == 32 and name != "2"


def _kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


def test_a_function_keeps_what_it_returns_true_for() -> None:
    model = convert_module(mlp(), first_last_layers_bf16=False, skip=wide)
    assert _kinds(model) == [Linear, Linear, nn.Linear, nn.Linear]
    table = FP8FabricPrecision(first_last_layers_bf16=False, skip=wide)
    table.convert_module(mlp())
    assert table.summary is not None
    assert [layer.reason for layer in table.summary.layers] == ["", "", "skip=wide", "skip=wide"]


def test_functions_and_globs_go_together() -> None:
    model = convert_module(mlp(), first_last_layers_bf16=False, skip=["0", lambda module, name: name == "4"])
    assert _kinds(model) == [nn.Linear, Linear, nn.Linear, Linear]
    with pytest.raises(ValueError, match="skip='5.5' matches no module"):
        convert_module(mlp(), skip=("5.5", wide))


def test_a_function_gets_every_name_of_a_shared_module_and_those_without_wrappers() -> None:
    model = Decoder()
    model.alias = model.blocks[1][0]
    asked: list[tuple[nn.Module, str]] = []

    def note(module: nn.Module, name: str) -> bool:
        asked.append((module, name))
        return name == "alias"

    convert_module(nn.Sequential(torch.compile(model)), first_last_layers_bf16=False, skip=note)
    assert (model.lm_head, "0.lm_head") in asked
    assert {"0.blocks.1.0", "0.alias"} <= {name for module, name in asked if module is model.alias}


@pytest.mark.parametrize("skip", [(wide, 3), 3, None, "wide"])
def test_what_is_neither_function_nor_glob_is_refused(skip: object) -> None:
    with pytest.raises(TypeError, match="must be a sequence of module-name globs.* or a function"):
        FP8Precision(skip=skip)  # type: ignore[arg-type]
