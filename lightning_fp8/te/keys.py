"""The keys of Transformer Engine's checkpoints, and the corresponding names in this package.

Parameters and states of a module named ``p``:

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

The value of a state has a column for each tensor, which :func:`column_of` returns. :func:`slots_of_gemms` returns the
slot for it. The rows of attention's projections may be fused or not, and ordered by heads or by names, see
:class:`ProjectionRows`. ``te_checkpoints/remap.py`` maps keys to the modules of a model. Modules of this package have
the same keys, and load their states by :func:`take_state` in torch's ``load_state_dict``.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.names import slot_name
from lightning_fp8.numerics.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role

# --- States -----------------------------------------------------------------------------------------------------------

# Lightning loads with weights_only=True, which refuses io.BytesIO, the container of 0.12 to 1.13. It only holds bytes.
torch.serialization.add_safe_globals([io.BytesIO])

EXTRA_STATE = "_extra_state"
INV_FREQ = "inv_freq"
FUSED_ATTENTION = "fused_attention"
"""The child of attention that has its state in 1.6 and 1.7. Later versions store it one level up."""

# Columns of a layer with g GEMMs: forward (input, weight, output) of each, backward (grad_output, grad_input) of each.
FORWARD_SLOTS = 3
BACKWARD_SLOTS = 2
_COLUMNS = {Role.INPUT: 0, Role.WEIGHT: 1, Role.GRAD_OUTPUT: 0}
# Attention has the columns of three GEMMs: qkv and s are outputs of the first and third, o is the second's input, ...
_COLUMNS |= {Role.QKV: 2, Role.O: 3, Role.S: 8, Role.DQKV: 0, Role.DO: 3, Role.DP: 5}
ATTENTION_GEMMS = 3


def column_of(role: Role, gemm: int = 0) -> tuple[str, int]:
    """The direction (``"fwd"`` or ``"bwd"``) and the column of a tensor."""
    direction, slots = ("bwd", BACKWARD_SLOTS) if role.is_gradient else ("fwd", FORWARD_SLOTS)
    return direction, gemm * slots + _COLUMNS[role]


def slots_of_gemms(gemms: Iterable[tuple[int, str]], roles: Sequence[Role]) -> dict[str, tuple[Role, int]]:
    """The names of slots (``layers.0.mlp.fc1.input``), each with the role and the GEMM of its column.

    Args:
        gemms: the index of each GEMM in the state, with its name in this package: the name of the module, followed by
            the GEMM's name if the module has several.
    """
    return {slot_name(name, role): (role, gemm) for gemm, name in gemms for role in roles}


def slots_of_state(module_name: str, num_gemms: int) -> dict[str, tuple[Role, int]]:
    """:func:`slots_of_gemms` without a model: of 1 GEMM a linear layer's, of 2 LayerNormMLP's, of 3 attention's."""
    if num_gemms == ATTENTION_GEMMS:
        return slots_of_gemms([(0, module_name)], ATTENTION_ROLES)
    halves = [f"{module_name}.{half}".lstrip(".") for half in ("fc1", "fc2")]
    names_of_gemms = {1: [module_name], 2: halves}.get(num_gemms, [])
    return slots_of_gemms(enumerate(names_of_gemms), LINEAR_ROLES)


def is_state(key: str) -> bool:
    """Whether ``key`` is the key of a module's FP8 state."""
    return key.rpartition(".")[2] == EXTRA_STATE


def has_te_state(names: Iterable[str]) -> bool:
    """Whether a ``state_dict`` with these keys has FP8 state of Transformer Engine."""
    return any(map(is_state, names))


def is_grouped(owner: str, names: Container[str]) -> bool:
    """Whether ``owner`` is a GroupedLinear, whose columns are ordered by role and not by GEMM."""
    return f"{prefix_of(owner)}weight0" in names


def state_key(module_name: str, attention: bool = False, version: tuple[int, int] = (2, 0)) -> str:
    """The key of a module's state in ``version``. ``attention`` is True for the state of attention."""
    middle = f"{FUSED_ATTENTION}." if attention and version < (1, 8) else ""
    return f"{prefix_of(module_name)}{middle}{EXTRA_STATE}"


def module_of_state(key: str, modules: Container[str]) -> str:
    """The module that owns the state under ``key``: one level up if ``modules`` does not have the key's own module."""
    owner = key.rpartition(".")[0]
    parent, _, last = owner.rpartition(".")
    return parent if last == FUSED_ATTENTION and owner not in modules else owner


def take_state(state_dict: dict[str, Any], prefix: str) -> tuple[str, Any] | None:
    """Remove the state of the module with ``prefix`` (``"layers.0."``) from ``state_dict``, and return key and value.

    If attention has states in the old and in the new place, it warns and returns the new one.
    """
    candidates = [prefix + EXTRA_STATE, f"{prefix}{FUSED_ATTENTION}.{EXTRA_STATE}"]
    states = [(key, state_dict.pop(key)) for key in candidates if key in state_dict]
    if len(states) > 1:
        (newer, _), (older, _) = states
        warnings.warn(f"{older} of an older Transformer Engine is ignored: {newer} is newer", stacklevel=3)
    return states[0] if states else None


def prefix_of(module_name: str) -> str:
    """The prefix of the names of a module's parameters: ``layers.0.``."""
    return f"{module_name}." if module_name else ""


# --- Projections of attention -----------------------------------------------------------------------------------------
#
# Transformer Engine has one fused parameter for the projections to queries, keys and values, or one for each
# (``fuse_qkv_params``). Rows of a fused one are ordered by groups of heads or by names (``qkv_weight_interleaved``).


@dataclass(frozen=True)
class ProjectionRows:
    """The order of a projection's rows in its weight, its bias and its output.

    Attributes:
        heads: the number of heads in a group of each output: of ``query``, ``key`` and ``value``, or some of them.
        groups: the number of groups, which is the number of key and value heads.
        channels: the number of channels of a head.
        interleaved: True orders rows by group: its query heads, its key head, its value head. False puts all queries
            first, then all keys, then all values.
    """

    heads: Mapping[str, int]
    groups: int
    channels: int
    interleaved: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Rows by name."""
        return {name: heads * self.groups * self.channels for name, heads in self.heads.items()}

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split ``[..., rows]`` to ``[..., heads, channels]`` for each name. Results are views if not interleaved."""
        if not self.interleaved:
            return tuple(part.unflatten(-1, (-1, self.channels)) for part in x.split([*self.sizes.values()], -1))
        grouped = x.unflatten(-1, (self.groups, sum(self.heads.values()), self.channels))
        return tuple(part.flatten(-3, -2) for part in grouped.split([*self.heads.values()], -2))

    def split_parameter(self, fused: Tensor) -> dict[str, Tensor]:
        """Split a weight ``[rows, in]`` or a bias ``[rows]`` by names, with the rows of each name ordered by heads."""
        heads = self.split_heads(fused.movedim(0, -1))
        return {name: part.flatten(-2).movedim(-1, 0) for name, part in zip(self.heads, heads)}

    def join_parameters(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`split_parameter`."""
        if not self.interleaved:
            return torch.cat([parts[name] for name in self.heads])
        grouped = [parts[name].unflatten(0, (self.groups, n, self.channels)) for name, n in self.heads.items()]
        return torch.cat(grouped, 1).flatten(0, 2)


def rows_of_projections(
    heads: int, groups: int, channels: int, self_attention: bool, interleaved: bool, input_layernorm: bool
) -> dict[str, ProjectionRows]:
    """The rows of each projection of attention, by the name of its module.

    Args:
        heads, groups: the numbers of query heads, and of key and value heads.
        self_attention: whether one module projects one tensor to queries, keys and values.
        input_layernorm: whether the module that projects to queries has a norm.
    """
    query, key_value = {"query": heads // groups}, {"key": 1, "value": 1}
    if self_attention:
        by_name = {"layernorm_qkv" if input_layernorm else "qkv": query | key_value}
    else:
        by_name = {"layernorm_query" if input_layernorm else "query_layer": query, "key_value": key_value}
    return {name: ProjectionRows(of_name, groups, channels, interleaved) for name, of_name in by_name.items()}


def has_split_parameters(projection: str, fuse_qkv_params: bool) -> bool:
    """Whether the projection has one parameter for each of its outputs, as ``query_weight``: never ``query_layer``."""
    return not fuse_qkv_params and projection != "query_layer"


def split_or_joined(parameters: Mapping[str, Any], order: ProjectionRows, split: bool) -> dict[str, Any]:
    """Split or join the parameters of a projection.

    Args:
        parameters: the parameters by name without prefix. Those of a norm and unknown ones are returned unchanged.
        order: the order of the projection's rows.
        split: True returns ``query_weight``, ``query_bias``, ...; False returns ``weight`` and ``bias``.
    """
    renamed = dict(parameters)
    for leaf in ("weight", "bias"):
        names = {name: f"{name}_{leaf}" for name in order.heads}
        parts = {name: renamed.get(own_name) for name, own_name in names.items()}
        fused = renamed.get(leaf)
        if split and isinstance(fused, Tensor) and fused.dim() and len(fused) == sum(order.sizes.values()):
            del renamed[leaf]
            renamed |= {names[name]: part for name, part in order.split_parameter(fused).items()}
        elif not split and all(isinstance(x, Tensor) and len(x) == order.sizes[name] for name, x in parts.items()):
            renamed = {name: value for name, value in renamed.items() if name not in names.values()}
            renamed[leaf] = order.join_parameters(parts)  # type: ignore[arg-type]
    return renamed


# --- Prefixes ---------------------------------------------------------------------------------------------------------


def prefix_renamer(file_names: list[str], model_keys: set[str], modules: set[str]) -> Callable[[str], str | None]:
    """Return a function that maps names in the file to names in the model, by replacing one prefix with another.

    It uses the pair of prefixes with which the largest number of names match names in the model. If no pair matches
    more names than the unchanged names do, names are not changed. Names that do not start with the replaced prefix,
    such as those of a metric or a loss, are not changed either. If such a name equals the new name of another, it is
    mapped to None. For example, if ``model.`` is removed, ``model.head.weight`` becomes ``head.weight``, and a
    ``head.weight`` of the LightningModule itself is mapped to None.
    """
    strips, named = ["", *_leading_paths(file_names)], modules - {""}
    prepends = ["", *sorted(f"{name}." for name in named if name.count(".") <= 1)]

    def renamed(name: str, strip: str, prepend: str) -> str:
        return prepend + name.removeprefix(strip) if name.startswith(strip) else name

    def fits(strip: str, prepend: str) -> int:
        names = [renamed(name, strip, prepend) for name in file_names]
        return sum(name in model_keys or name.rpartition(".")[0] in named for name in names)

    if fits("", "") == len(file_names):
        return lambda name: name
    strip, prepend = max(product(strips, prepends), key=lambda pair: (fits(*pair), not any(pair)))
    taken = {renamed(name, strip, prepend) for name in file_names if name.startswith(strip)}
    return lambda name: None if not name.startswith(strip) and name in taken else renamed(name, strip, prepend)


def _leading_paths(names: list[str]) -> list[str]:
    """The dotted prefixes of more than half of the names, shortest first."""
    paths = [""]
    while True:
        inside = [name.removeprefix(paths[-1]) for name in names if name.startswith(paths[-1])]
        heads = Counter(head for head, dot, _ in (name.partition(".") for name in inside) if dot)
        head, count = max(heads.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count <= len(names):
            return paths[1:]
        paths.append(f"{paths[-1]}{head}.")
