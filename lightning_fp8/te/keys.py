"""The keys of Transformer Engine's checkpoints: what it calls its tensors, and what they are called here.

Parameters and states of a module called ``p``:

| module of Transformer Engine | its keys | here |
|---|---|---|
| Linear | ``p.weight``, ``p.bias`` | of ``p``: the same |
| Linear, ``parameters_split`` | ``p.query_weight``, ``p.key_weight``, ... | the same, or ``p.weight`` of all rows |
| LayerNormLinear | Linear's, ``p.layer_norm_weight``, ... | ours, or the norm and the Linear inside ``p`` |
| LayerNormMLP | ``p.layer_norm_weight``, ``p.fc1_weight``, ... | ours, or a norm and two Linears inside |
| MultiheadAttention | ``p.qkv.weight`` or ``p.qkv.query_weight``, ... | ours, fused or not, rows by heads |
| Linear, LayerNormLinear | ``p._extra_state`` | slots ``p.input``, ``p.weight``, ``p.grad_output`` |
| LayerNormMLP | ``p._extra_state`` | slots ``p.fc1.input``, ..., ``p.fc2.grad_output`` |
| attention of 1.6 and 1.7 | ``p.fused_attention._extra_state`` | slots ``p.qkv``, ``p.s``, ``p.o``, ``p.dqkv``, ... |
| attention from 1.8 on | ``p._extra_state`` | the same slots |
| LayerNorm, RMSNorm from 2.0 on, L2Normalization | ``p._extra_state``, always empty | nothing |
| RotaryPositionEmbedding | ``p.inv_freq`` | nothing: it is computed |
| GroupedLinear | ``p.weight0``, ..., ``p._extra_state`` | not read |

A state's value has a column for each tensor: :func:`column_of` says which, and :func:`slots_of_gemms` whose slot it
fills. The rows of attention's projections, fused or not, by heads or by names: :mod:`lightning_fp8.te.projections`.
:mod:`lightning_fp8.checkpoint.remap` finds the modules of a model that keys are for. Modules of ours have these keys
themselves, and take their states by :func:`take_state` in torch's own ``load_state_dict``.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from lightning_fp8.names import slot_name
from lightning_fp8.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role

# --- States -----------------------------------------------------------------------------------------------------------

EXTRA_STATE = "_extra_state"
INV_FREQ = "inv_freq"
FUSED_ATTENTION = "fused_attention"
"""Where 1.6 and 1.7 keep attention's state; later versions keep it one level up."""

# Columns of a layer with g GEMMs: forward (input, weight, output) of each, backward (grad_output, grad_input) of each.
FORWARD_SLOTS = 3
BACKWARD_SLOTS = 2
_LINEAR_COLUMNS = {Role.INPUT: 0, Role.WEIGHT: 1, Role.GRAD_OUTPUT: 0}
# Attention counts as three GEMMs: qkv and s are outputs of the first and third, o is the second's input, and so on.
_ATTENTION_COLUMNS = {Role.QKV: 2, Role.O: 3, Role.S: 8, Role.DQKV: 0, Role.DO: 3, Role.DP: 5}
ATTENTION_GEMMS = 3


def num_gemms_of(roles: tuple[Role, ...], linears: int = 1) -> int:
    """The number of GEMMs that Transformer Engine counts for a module of these roles, or of so many linear layers."""
    return ATTENTION_GEMMS if Role.QKV in roles else linears


def column_of(role: Role, gemm: int = 0) -> tuple[str, int]:
    """Direction (``"fwd"`` or ``"bwd"``) and column of a tensor."""
    if role in _ATTENTION_COLUMNS:
        return "bwd" if role.is_gradient else "fwd", _ATTENTION_COLUMNS[role]
    if role.is_gradient:
        return "bwd", gemm * BACKWARD_SLOTS + _LINEAR_COLUMNS[role]
    return "fwd", gemm * FORWARD_SLOTS + _LINEAR_COLUMNS[role]


def slots_of_gemms(gemms: Iterable[tuple[int, str]], roles: Sequence[Role]) -> dict[str, tuple[Role, int]]:
    """Names of slots, each with the role and the GEMM whose column it takes: ``layers.0.mlp.fc1.input``.

    Args:
        gemms: the index of each GEMM in the state, and the name it has here: its module's, and its own behind that
            where the module has several.
        roles: of the module.
    """
    return {slot_name(name, role): (role, gemm) for gemm, name in gemms for role in roles}


def slots_of_state(module_name: str, num_gemms: int) -> dict[str, tuple[Role, int]]:
    """As :func:`slots_of_gemms` of a state alone, where no model says what ``module_name`` is.

    One GEMM is a linear layer's, two are LayerNormMLP's ``fc1`` and ``fc2``, three are attention's; of more there are
    no slots.
    """
    if num_gemms == ATTENTION_GEMMS:
        return slots_of_gemms([(0, module_name)], ATTENTION_ROLES)
    halves = [f"{module_name}.{half}".lstrip(".") for half in ("fc1", "fc2")]
    names_of_gemms = {1: [module_name], 2: halves}.get(num_gemms, [])
    return slots_of_gemms(enumerate(names_of_gemms), LINEAR_ROLES)


def is_state(key: str) -> bool:
    """Whether ``key`` is that of a module's FP8 state."""
    return key.rpartition(".")[2] == EXTRA_STATE


def has_te_state(names: Iterable[str]) -> bool:
    """Whether a ``state_dict`` with these keys holds FP8 state of Transformer Engine."""
    return any(map(is_state, names))


def is_grouped(owner: str, names: Container[str]) -> bool:
    """Whether ``owner`` is a GroupedLinear, which orders its columns by role: read as GEMMs they would be wrong."""
    return f"{prefix_of(owner)}weight0" in names


def state_key(module_name: str, attention: bool = False, version: tuple[int, int] = (2, 0)) -> str:
    """The key under which ``version`` keeps a module's state; ``attention``: whether it is attention's."""
    middle = f"{FUSED_ATTENTION}." if attention and version < (1, 8) else ""
    return f"{prefix_of(module_name)}{middle}{EXTRA_STATE}"


def module_of_state(key: str, modules: Container[str]) -> str:
    """The module that the state under ``key`` belongs to, one level up where ``modules`` has none to keep it."""
    owner = key.rpartition(".")[0]
    parent, _, last = owner.rpartition(".")
    return parent if last == FUSED_ATTENTION and owner not in modules else owner


def take_state(state_dict: dict[str, Any], prefix: str) -> tuple[str, Any] | None:
    """Remove the state of the module with ``prefix`` (``"layers.0."``) from ``state_dict``; its key and its value.

    Where attention has two, of an older Transformer Engine and of a newer one, the newer is taken, with a warning.
    """
    candidates = [prefix + EXTRA_STATE, f"{prefix}{FUSED_ATTENTION}.{EXTRA_STATE}"]
    states = [(key, state_dict.pop(key)) for key in candidates if key in state_dict]
    if len(states) > 1:
        (newer, _), (older, _) = states
        warnings.warn(f"{older} of an older Transformer Engine is ignored: {newer} is newer", stacklevel=3)
    return states[0] if states else None


# --- Parameters -------------------------------------------------------------------------------------------------------

_PARAMETER = re.compile(r"(?:(\w+)_)?(weight|bias)")


def prefix_of(module_name: str) -> str:
    """The prefix of the names of a module's parameters: ``layers.0.``."""
    return f"{module_name}." if module_name else ""


def is_parameter(leaf: str) -> bool:
    """Whether a parameter of Transformer Engine may be called so: ``weight``, ``fc1_bias``, ``query_weight``."""
    return _PARAMETER.fullmatch(leaf) is not None


def stem_of(leaf: str) -> str:
    """``fc1`` of ``fc1_weight``; ``""`` of ``weight``."""
    return leaf.removesuffix("weight").removesuffix("bias").rstrip("_")


# --- Prefixes ---------------------------------------------------------------------------------------------------------


def prefix_renamer(file_names: list[str], model_keys: set[str], modules: set[str]) -> Callable[[str], str | None]:
    """A function from a name of the file to one of the model: it strips a leading path and prepends another.

    The pair is the one that lets most names fit; where none does better, names stay as they are. So do names without
    the leading path, which most names have: a metric's or a loss's beside ``model.``. One of them that another name
    becomes has no name in the model, None: a LightningModule's own ``head.weight`` beside ``model.head.weight``.
    """
    strips = ["", *_leading_paths(file_names)]
    prepends = ["", *sorted({f"{name}." for name in modules if name.count(".") <= 1 and name})]
    named = modules - {""}

    def renamed(name: str, strip: str, prepend: str) -> str:
        return prepend + name.removeprefix(strip) if name.startswith(strip) else name

    def fits(strip: str, prepend: str) -> int:
        names = [renamed(name, strip, prepend) for name in file_names]
        return sum(name in model_keys or name.rpartition(".")[0] in named for name in names)

    if fits("", "") == len(file_names):
        return lambda name: name
    strip, prepend = max(
        ((strip, prepend) for strip in strips for prepend in prepends), key=lambda pair: (fits(*pair), not any(pair))
    )
    taken = {renamed(name, strip, prepend) for name in file_names if name.startswith(strip)}
    return lambda name: None if not name.startswith(strip) and name in taken else renamed(name, strip, prepend)


def _leading_paths(names: list[str]) -> list[str]:
    """The dotted prefixes that more than half of the names share, shortest first."""
    paths = [""]
    while True:
        inside = [name.removeprefix(paths[-1]) for name in names if name.startswith(paths[-1])]
        heads = Counter(head for head, dot, _ in (name.partition(".") for name in inside) if dot)
        head, count = max(heads.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count <= len(names):
            return paths[1:]
        paths.append(f"{paths[-1]}{head}.")
