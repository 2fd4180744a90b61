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
fills. The rows of attention's projections are fused or not, by heads or by names: :class:`ProjectionRows`.
:mod:`lightning_fp8.te.remap` finds the modules of a model that keys are for. Modules of ours have these keys
themselves, and take their states by :func:`take_state` in torch's own ``load_state_dict``.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fp8.names import slot_name
from lightning_fp8.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role

# --- States -----------------------------------------------------------------------------------------------------------

# Lightning loads with weights_only=True, which refuses the container of 0.12 to 1.13. A BytesIO is bytes, and inert.
torch.serialization.add_safe_globals([io.BytesIO])

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


# --- Projections of attention -----------------------------------------------------------------------------------------
#
# Transformer Engine fuses the projections to queries, keys and values into one parameter or keeps one for each
# (``fuse_qkv_params``), and orders the rows of a fused one by groups of heads or by names (``qkv_weight_interleaved``).


@dataclass(frozen=True)
class ProjectionRows:
    """The order of a projection's rows, in its weight, its bias and its output.

    Attributes:
        names: what is projected to: ``("query", "key", "value")``, or some of them.
        heads_per_group: the number of heads of each.
        groups: heads of keys and values.
        channels: of a head.
        interleaved: groups follow each other, each with its query heads, its key and its value; else all queries come
            first, then all keys, then all values.
    """

    names: tuple[str, ...]
    heads_per_group: tuple[int, ...]
    groups: int
    channels: int
    interleaved: bool

    def with_order(self, interleaved: bool) -> ProjectionRows:
        """The same rows in the order that ``interleaved`` says."""
        return replace(self, interleaved=interleaved)

    @property
    def sizes(self) -> dict[str, int]:
        """Rows by name."""
        return {name: heads * self.groups * self.channels for name, heads in zip(self.names, self.heads_per_group)}

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[..., rows]`` as ``[..., heads, channels]`` of each name; views, where they are not interleaved."""
        if not self.interleaved:
            parts = x.split([*self.sizes.values()], -1)
            return tuple(
                part.unflatten(-1, (heads * self.groups, self.channels))
                for part, heads in zip(parts, self.heads_per_group)
            )
        grouped = x.unflatten(-1, (self.groups, sum(self.heads_per_group), self.channels))
        return tuple(part.flatten(-3, -2) for part in grouped.split(self.heads_per_group, -2))

    def split_parameter(self, fused: Tensor) -> dict[str, Tensor]:
        """A weight ``[rows, in]`` or a bias ``[rows]`` by names, each with the rows of its heads in their order."""
        heads = self.split_heads(fused.movedim(0, -1))
        return {name: part.flatten(-2).movedim(-1, 0) for name, part in zip(self.names, heads)}

    def join_parameters(self, parts: Mapping[str, Tensor]) -> Tensor:
        """What :meth:`split_parameter` takes, of what it gives."""
        if not self.interleaved:
            return torch.cat([parts[name] for name in self.names])
        grouped = [
            parts[name].unflatten(0, (self.groups, heads, self.channels))
            for name, heads in zip(self.names, self.heads_per_group)
        ]
        return torch.cat(grouped, 1).flatten(0, 2)


def rows_of_projections(
    heads: int, groups: int, channels: int, self_attention: bool, interleaved: bool, input_layernorm: bool
) -> dict[str, ProjectionRows]:
    """The rows of each projection of attention, by the name of its module.

    Args:
        heads: of queries.
        groups: heads of keys and values.
        channels: of a head.
        self_attention: queries, keys and values are projected from one tensor, by one module.
        interleaved: see :class:`ProjectionRows`.
        input_layernorm: the module that projects to queries has a norm in front.
    """
    share = heads // groups
    of = (groups, channels, interleaved)
    if self_attention:
        name = "layernorm_qkv" if input_layernorm else "qkv"
        return {name: ProjectionRows(("query", "key", "value"), (share, 1, 1), *of)}
    name = "layernorm_query" if input_layernorm else "query_layer"
    return {
        name: ProjectionRows(("query",), (share,), *of),
        "key_value": ProjectionRows(("key", "value"), (1, 1), *of),
    }


def has_split_parameters(projection: str, fuse_qkv_params: bool) -> bool:
    """Whether the projection's parameters are named by what it projects to: ``query_weight``.

    Those of ``query_layer``, which projects to queries alone, never are; those of ``layernorm_query`` may be.
    """
    return not fuse_qkv_params and projection != "query_layer"


class Projecting(Protocol):
    """Attention with projections, as our ``MultiheadAttention`` is.

    Attributes:
        projection_rows: the order of each projection's rows, by the name of its module; of this rank's rows.
        tp_size: the number of tensor-parallel ranks.
        fuse_qkv_params: a projection to several tensors has one weight.
        qkv_weight_interleaved: its rows are by groups of heads.
    """

    tp_size: int
    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    projection_rows: dict[str, ProjectionRows]


def projection_parameters(attention: Projecting, projection: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a projection as ``attention`` names them, split or joined, their rows in its order.

    Args:
        projection: the name of its module in ``attention``.
        parameters: by name, without prefix, of this rank or of all tensor-parallel ranks together; others are
            returned unchanged.
    """
    if (order := attention.projection_rows.get(projection)) is None:
        return dict(parameters)
    split = has_split_parameters(projection, attention.fuse_qkv_params)
    order = order.with_order(attention.qkv_weight_interleaved)
    renamed = _split_or_joined(parameters, order, split)
    if renamed.keys() == parameters.keys() and attention.tp_size > 1:
        renamed = _split_or_joined(parameters, replace(order, groups=order.groups * attention.tp_size), split)
    return renamed


def _split_or_joined(parameters: Mapping[str, Any], order: ProjectionRows, split: bool) -> dict[str, Any]:
    """Parameters of a projection as one that is ``split``, or is not, names them.

    Args:
        parameters: by name, without their prefix; those of a norm, and what fits nothing, stay as they are.
        order: of the projection's rows.
        split: ``query_weight``, ``query_bias``, ...; else ``weight`` and ``bias``.
    """
    sizes = order.sizes
    renamed = dict(parameters)
    for leaf in ("weight", "bias"):
        parts = {name: renamed.get(f"{name}_{leaf}") for name in sizes}
        fused = renamed.get(leaf)
        if split and isinstance(fused, Tensor) and fused.dim() and len(fused) == sum(sizes.values()):
            del renamed[leaf]
            renamed |= {f"{name}_{leaf}": part for name, part in order.split_parameter(fused).items()}
        elif not split and all(isinstance(x, Tensor) and len(x) == sizes[name] for name, x in parts.items()):
            split_names = {f"{name}_{leaf}" for name in sizes}
            renamed = {name: value for name, value in renamed.items() if name not in split_names}
            renamed[leaf] = order.join_parameters(parts)  # type: ignore[arg-type]
    return renamed


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
