"""A glob in ``skip`` that matches nothing is an error that names what was perhaps meant."""

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
