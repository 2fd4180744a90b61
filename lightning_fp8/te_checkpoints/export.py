"""Writes a state dict in the layout that a given version of Transformer Engine reads."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import require_module
from lightning_fp8.delayed.history import Slot
from lightning_fp8.modules.conv1d import TransposedLinear
from lightning_fp8.modules.experts import Experts
from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.names import clean_name
from lightning_fp8.numerics.formats import holds_codes
from lightning_fp8.numerics.recipes import DelayedScaling, make_recipe
from lightning_fp8.numerics.scaled import ATTENTION_ROLES, Role
from lightning_fp8.te.keys import ATTENTION_GEMMS, BACKWARD_SLOTS, FORWARD_SLOTS, column_of, state_key
from lightning_fp8.te.torch_file import Standin

_RECIPES = "transformer_engine.common.recipe"


def export_te_state_dict(model: nn.Module, version: str, recipe: Any = None) -> dict[str, Any]:
    """The parameters of ``model`` and its delayed-scaling state in the format of Transformer Engine ``version``.

    A tensor without a scale gets Transformer Engine's initial state, scale 1 and amax 0. Attention has no state before
    1.6. Versions 2.16.1, 2.17.1 and from 2.18 on load FP8 state, including their own, only with
    ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``.

    Args:
        model: a model with FP8 layers.
        version: ``"1.13"``, ``"2.4.0"``, ...; 0.12 or later.
        recipe: a ``DelayedScaling``, or an argument of :func:`make_recipe` for one. It determines the formats, and is
            part of the state from 2.0 on. ``None`` is ``DelayedScaling()`` with the history's length.

    Returns:
        The state dict. Values of ``_extra_state`` are ``io.BytesIO`` up to 1.13, and uint8 tensors from 2.0 on.

    Raises:
        ValueError: If ``version`` is invalid or before 0.12, if the recipe is not delayed scaling, or if a layer stores
            its weight transposed or as FP8 codes.
        TypeError: If ``model`` is not a module, ``version`` not a string, or ``recipe`` not a recipe.
    """
    require_module("export_te_state_dict", model)
    number = parse_version(version)
    recipe = None if recipe is None else make_recipe(recipe)
    if not isinstance(recipe, DelayedScaling | None):
        raise ValueError(f"recipe={recipe.name!r} has no state to export; pass DelayedScaling(...), or None")
    if foreign := [name for name, module in fp8_modules(model) if isinstance(module, (TransposedLinear, Experts))]:
        raise ValueError(
            f"{', '.join(foreign)}: Transformer Engine has no module that holds its weights as transformers' Conv1D "
            "(transposed) or experts (3-D) do; replace it by a Linear, or one for each matrix, first"
        )
    state_dict = {clean_name(key): value for key, value in model.state_dict().items()}
    if codes := [key for key, value in state_dict.items() if isinstance(value, Tensor) and holds_codes(value)]:
        raise ValueError(
            f"{codes[0]} is FP8 codes, whose scales have no key in Transformer Engine: load the model with "
            "quantization_config=FineGrainedFP8Config(dequantize=True)"
        )
    for name, module in fp8_modules(model):
        slots = module.slots_of_gemms if module.fp8 else ()
        attention = module.roles == ATTENTION_ROLES
        if attention and number < (1, 6):
            continue
        num_gemms = ATTENTION_GEMMS if attention else len(module.gemms)
        state_dict[state_key(name, attention, number)] = _value(_columns(slots, num_gemms), num_gemms, number, recipe)
    if number >= (2, 0):  # from 2.0 on norms have a state, which is always empty
        for name, module in model.named_modules():
            if isinstance(module, (LayerNorm, RMSNorm)):
                state_dict[state_key(clean_name(name))] = _value(None, 0, (2, 4), None)
    return state_dict


def parse_version(version: str) -> tuple[int, int]:
    """The major and minor number of ``version``."""
    if not isinstance(version, str):
        raise TypeError(f"version={version!r} must be text: {str(version)!r}; as a number 1.10 is 1.1")
    match = re.match(r"(\d+)\.(\d+)(\.|$)", version)
    if not match:
        raise ValueError(f"version={version!r} is not a Transformer Engine version; pass one like '1.13' or '2.4.0'")
    number = int(match[1]), int(match[2])
    if number < (0, 12):
        raise ValueError(f"version={version!r} is too old to be written; 0.12 and later are")
    return number


def _columns(slots_of_gemms: Sequence[Mapping[Role, Slot]], num_gemms: int) -> dict[str, Tensor] | None:
    """A module's state; tensors without a scale have Transformer Engine's initial one, scale 1 and amax 0."""
    if not slots_of_gemms:
        return None
    length = max(1, *(len(slot.history.amax_history) for slots in slots_of_gemms for slot in slots.values()))
    te_columns = {}
    on_cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    for direction, slots_of_gemm in (("fwd", FORWARD_SLOTS), ("bwd", BACKWARD_SLOTS)):
        te_columns[f"scale_{direction}"] = torch.ones(slots_of_gemm * num_gemms, **on_cpu)
        te_columns[f"amax_history_{direction}"] = torch.zeros(length, slots_of_gemm * num_gemms, **on_cpu)
    for gemm, slots in enumerate(slots_of_gemms):
        for role, slot in slots.items():
            direction, index = column_of(role, gemm)
            te_columns[f"scale_{direction}"][index] = slot.scale.item() or 1.0
            amax_history = slot.history.amax_history[:, slot.index].detach().cpu()
            te_columns[f"amax_history_{direction}"][length - len(amax_history) :, index] = amax_history
    return te_columns


def _value(
    te_columns: dict[str, Tensor] | None, num_gemms: int, version: tuple[int, int], recipe: DelayedScaling | None
) -> io.BytesIO | Tensor:
    if te_columns is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu") if version >= (2, 4) else _packed(None, version)
    length = len(te_columns["amax_history_fwd"])
    recipe = recipe or DelayedScaling(amax_history_len=length)
    state: dict[str, Any] = dict(te_columns)
    extra: dict[str, Any] = {"fp8_checkpoint": True, "num_gemms": num_gemms}
    if version >= (2, 0):
        state = {"recipe": _te_recipe(recipe, length), **state}
    else:
        state |= {f"scale_inv_{way}": te_columns[f"scale_{way}"].reciprocal() for way in ("fwd", "bwd")}
        extra |= {"fp8_max_fwd": recipe.fp8_format.forward.max, "fp8_max_bwd": recipe.fp8_format.backward.max}
        if version < (1, 6):
            state |= {"global_fp8_buffer": {}, "global_fp8_state": {}}
    return _packed({**state, "extra_fp8_variables": extra}, version)


def _packed(state: dict[str, Any] | None, version: tuple[int, int]) -> io.BytesIO | Tensor:
    buffer = io.BytesIO()
    if version >= (2, 0):
        _StandinPickler(buffer, protocol=4).dump(state)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def _te_recipe(recipe: DelayedScaling, length: int) -> Standin:
    largest = (recipe.fp8_format.forward.max, recipe.fp8_format.backward.max)
    fp8_format = Standin(f"{_RECIPES}.Format", (Standin(f"{_RECIPES}._FormatHelper", largest),))
    fields = {
        "margin": recipe.margin,
        "fp8_format": fp8_format,
        "amax_history_len": length,
        "amax_compute_algo": recipe.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": recipe.reduce_amax,
        "fp8_dpa": recipe.fp8_dpa,
        "fp8_mha": recipe.fp8_mha,
    }
    return Standin(f"{_RECIPES}.DelayedScaling", (), fields)


# The pickler written in Python. The one in C would import a class before it writes its name.
_Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class _StandinPickler(_Pickler):
    """A pickler that writes a :class:`Standin` as an object of its class, which does not have to be installed."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def save_standin(self, standin: Standin) -> None:
        """Write the opcodes that make an object of the class ``standin.name``."""
        module_name, _, name = standin.name.rpartition(".")
        self.save(module_name)
        self.save(name)
        self.write(pickle.STACK_GLOBAL)
        self.save(standin.args)
        # As in pickle, an object with attributes is created empty and filled; others are created from arguments.
        self.write(pickle.NEWOBJ if standin.state else pickle.REDUCE)
        if standin.state:
            self.save(standin.state)
            self.write(pickle.BUILD)

    dispatch[Standin] = save_standin
