"""Recipes: how a training run scales its tensors. A recipe is a frozen dataclass.

The names and fields are Transformer Engine's (``transformer_engine.common.recipe``), whose other arguments are in
``recipe_arguments.py``; ``Float8RowwiseScaling`` is torchao's ``rowwise``. The field ``name`` identifies the recipe in
YAML, mappings and checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import torch
from torch.torch_version import TorchVersion

from lightning_fp8.arguments import naming_arguments, one_of, plain, require_bool, require_number, unknown_name
from lightning_fp8.numerics.formats import E4M3, Float8, Format
from lightning_fp8.numerics.recipe_arguments import translated, without_defaults
from lightning_fp8.numerics.scaled import Cast, Layout, Role
from lightning_fp8.numerics.scaling import FLOAT32_MAX, AmaxAlgorithm

LONGEST_HISTORY = 2**16
"""In steps. The history of 1,000 tensors is then 262 MB, which every update reads."""

LARGEST_MARGIN = math.frexp(E4M3.max * 2**10)[1] - 1
"""In powers of two. With one more, a tensor's largest value would be below half of E4M3's smallest: all become 0."""


_TRACES_RECIPES = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile(fullgraph=True) supports a function that creates a recipe."""


def _require_int(name: str, value: Any, minimum: int, maximum: int | None = None, because: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name}={value} must be at most {maximum}: {because}")


def _require_override(name: str, value: Any) -> None:
    if value is not None:
        one_of(name, value, ("high_precision", "dequantized"))


def _require_algorithm(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ("max", "most_recent"):
        raise ValueError(f"{name}={value!r} is unknown; use 'max' or 'most_recent'")


_TOO_SMALL = f"E4M3 spans {LARGEST_MARGIN} binary digits, with more headroom every value would become 0"
_TOO_LONG = "the window takes 4 bytes for each step and tensor, and every update reads it; 1024 is usual"
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("fp8_dpa", "fp8_mha", "reduce_amax", "power_2_scale"), require_bool),
    "backward_override": _require_override,
    "margin": partial(_require_int, minimum=0, maximum=LARGEST_MARGIN, because=_TOO_SMALL),
    "interval": partial(_require_int, minimum=1),
    "amax_history_len": partial(_require_int, minimum=1, maximum=LONGEST_HISTORY, because=_TOO_LONG),
    "amax_compute_algo": _require_algorithm,
    "amax_epsilon": partial(require_number, largest=FLOAT32_MAX),
}
"""The checks of fields, by name. Those of a recipe's name and format are in :meth:`RecipeFields.__post_init__`."""


_Class = TypeVar("_Class", bound=type)


def _takes_te_arguments(cls: _Class) -> _Class:
    """Let the class accept Transformer Engine's arguments in addition to its fields; see
    :mod:`lightning_fp8.numerics.recipe_arguments`."""
    init = naming_arguments(cls.__init__)  # type: ignore[misc]

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **translated(cls.__name__, kwargs))

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _is_named(*names: str) -> Any:
    """A class method: whether the recipe's name is one of ``names``."""
    return classmethod(lambda cls: cls.name in names)


@dataclass(frozen=True, kw_only=True)
class RecipeFields:
    """The base class of recipes: a name, a format, a cast for each role, and options of attention.

    Attributes:
        fp8_dpa: run :class:`lightning_fp8.DotProductAttention` in FP8, with current scaling under any recipe.
        fp8_mha: the same as ``fp8_dpa``. In Transformer Engine it also removes the casts around attention.
        backward_override: compute the gradients of ``Linear`` and ``LayerNormLinear`` in high precision, either from
            the original tensors (``"high_precision"``) or from the dequantized values of the forward pass
            (``"dequantized"``). None computes them in FP8. Not supported by :class:`DelayedScaling`.
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Literal["high_precision", "dequantized"] | None = None

    _formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3)

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling() and not _TRACES_RECIPES:
            raise RuntimeError(
                "torch.compile before torch 2.13 cannot make a recipe: make it outside of the compiled function, or "
                "pass the recipe's name"
            )
        expected = type(self).name  # type: ignore[attr-defined]
        for field in dataclasses.fields(self):
            name, value = field.name, plain(getattr(self, field.name))
            object.__setattr__(self, name, value)
            if name in _CHECKS:
                _CHECKS[name](name, value)
            elif name == "name" and (not isinstance(value, str) or value != expected):
                raise ValueError(
                    f"{name}={value!r} does not belong to {type(self).__name__}, whose name is {expected!r}"
                )
            elif name == "fp8_format" and not isinstance(value, Format):
                names = ", ".join(map(repr, self._formats))
                raise TypeError(f"{name}={value!r} is not a lightning_fp8.Format; use one of {names}")
            elif name == "fp8_format" and value not in self._formats:
                names = ", ".join(format.name for format in self._formats)
                raise ValueError(f"{name}={value.name} is not supported by {expected!r}; use one of {names}")
        # Made under torch.compile, a recipe's numbers may pass for ones that vary.
        object.__setattr__(self, "_casts", {role: self._cast(role) for role in Role})

    def cast(self, role: Role) -> Cast:
        """Format and scales of the tensors of ``role``."""
        return self._casts[role]  # type: ignore[attr-defined, no-any-return]

    def _cast(self, role: Role) -> Cast:
        raise NotImplementedError

    # Transformer Engine's predicates

    delayed = _is_named("delayed")
    float8_current_scaling = _is_named("tensorwise")
    float8_per_tensor_scaling = _is_named("delayed", "tensorwise")
    float8_block_scaling = _is_named("blockwise")
    mxfp8 = _is_named("mxfp8")
    nvfp4 = _is_named()  # no recipe casts to four bits
    custom = _is_named()  # no recipe supports a factory of quantizers


@_takes_te_arguments
@dataclass(frozen=True)
class DelayedScaling(RecipeFields):
    """One scale per tensor, from its amaxes in earlier steps. There is no pass over the data before the cast.

    Attributes:
        margin: headroom above the largest amax of the history, in powers of two; at most 18, the range of E4M3.
        interval: the number of optimizer steps between recomputations of a scale; only steps with a finite, nonzero
            amax count. Before the first one the scale is 0, and the tensor is cast by its current amax, as with
            ``Float8CurrentScaling``.
        fp8_format: ``HYBRID`` or ``E4M3``.
        amax_history_len: the number of steps in the history; at most 65536. Each step takes 4 bytes per tensor.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` amax.
        reduce_amax: share scales by reducing amaxes over all ranks, or those of ``fp8_group``, which must then hold the
            same layers. Under a plugin, the field of the plugin's recipe is used.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True
    name: Literal["delayed"] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_override is not None:
            raise ValueError(
                f"backward_override={self.backward_override!r} is not supported by DelayedScaling, which needs the "
                "amaxes of gradients; use another recipe"
            )

    def _cast(self, role: Role) -> Cast:
        return Cast(float8_for(self.fp8_format, role), Layout.TENSOR)


@_takes_te_arguments
@dataclass(frozen=True)
class Float8CurrentScaling(RecipeFields):
    """One scale per tensor, from its current amax. It takes two passes over the data and has no state.

    Attributes:
        fp8_format: ``HYBRID`` or ``E4M3``.
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound on each amax of linear layers.
    """

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    name: Literal["tensorwise"] = "tensorwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "amax_epsilon", float(self.amax_epsilon))

    def _cast(self, role: Role) -> Cast:
        return Cast(float8_for(self.fp8_format, role), Layout.TENSOR, self.power_2_scale, self.amax_epsilon)


@_takes_te_arguments
@dataclass(frozen=True)
class Float8RowwiseScaling(RecipeFields):
    """One scale per row of each GEMM operand along its contraction, a power of two.

    Attributes:
        fp8_format: ``E4M3`` (torchao's choice) or ``HYBRID``.
    """

    fp8_format: Format = Format.E4M3
    name: Literal["rowwise"] = "rowwise"

    _formats = Format.E4M3, Format.HYBRID

    def _cast(self, role: Role) -> Cast:
        return Cast(float8_for(self.fp8_format, role), Layout.ROW, power_2_scale=True)


@_takes_te_arguments
@dataclass(frozen=True)
class Float8BlockScaling(RecipeFields):
    """One scale per 1 × 128 block of inputs and gradients, and per 128 × 128 block of weights (DeepSeek-V3's recipe).

    Attributes:
        fp8_format: ``E4M3``.
        power_2_scale: round scales down to powers of two.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    name: Literal["blockwise"] = "blockwise"

    _formats = (Format.E4M3,)

    def _cast(self, role: Role) -> Cast:
        layout = Layout.BLOCK_128X128 if role is Role.WEIGHT else Layout.BLOCK_1X128
        return Cast(float8_for(self.fp8_format, role), layout, self.power_2_scale)


@_takes_te_arguments
@dataclass(frozen=True)
class MXFP8BlockScaling(RecipeFields):
    """OCP microscaling: blocks of 32 along the contraction, scales in E8M0.

    Attributes:
        fp8_format: ``E4M3`` or ``HYBRID``.
    """

    fp8_format: Format = Format.E4M3
    name: Literal["mxfp8"] = "mxfp8"

    _formats = Format.E4M3, Format.HYBRID

    def _cast(self, role: Role) -> Cast:
        return Cast(float8_for(self.fp8_format, role), Layout.MX_1X32, power_2_scale=True)


Recipe: TypeAlias = (
    DelayedScaling | Float8CurrentScaling | Float8RowwiseScaling | Float8BlockScaling | MXFP8BlockScaling
)

RECIPES: dict[str, type[Recipe]] = {
    recipe.__dataclass_fields__["name"].default: recipe  # type: ignore[union-attr]
    for recipe in get_args(Recipe)
}
"""The recipes by name."""

_FIELDS = {recipe: [field.name for field in dataclasses.fields(recipe)] for recipe in RECIPES.values()}

# Megatron-LM's configuration keys: (key, field of the recipe); a recipe without the field ignores the key, as
# Megatron does with amax settings of recipes that keep no history.
_MEGATRON_FIELDS = {
    "fp8_margin": "margin",
    "fp8_interval": "interval",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "fp8_dot_product_attention": "fp8_dpa",
    "fp8_multi_head_attention": "fp8_mha",
}
_MEGATRON_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}
_MEGATRON_KEYS = ("fp8", "fp8_recipe", *_MEGATRON_FIELDS)


_OF_FORWARD = {each: each.forward for each in Format}
_OF_BACKWARD = {each: each.backward for each in Format}
"""The formats of both passes, as data, because torch.compile does not support attributes of the members of an enum."""


def float8_for(format: Format, role: Role) -> Float8:
    """The FP8 format of ``role`` under ``format``."""
    return (_OF_BACKWARD if role.is_gradient else _OF_FORWARD)[format]


_AS_NAMED = {recipe: recipe() for recipe in RECIPES.values()}
"""A recipe of each class. torch.compile(fullgraph=True) supports recipe objects, but cannot create one."""


def make_recipe(recipe: Recipe | str | Mapping[str, Any]) -> Recipe:
    """The recipe that ``recipe`` describes.

    Args:
        recipe: a recipe object; a name (``"delayed"``, ``"tensorwise"``, ``"rowwise"``, ``"blockwise"``,
            ``"mxfp8"``); a mapping of ``name`` (default ``"delayed"``) and fields; one of ``class_path`` and
            ``init_args``, as in YAML; or a mapping of Megatron-LM's keys
            (``fp8``, ``fp8_recipe``, ``fp8_margin``, ``fp8_interval``, ``fp8_amax_history_len``,
            ``fp8_amax_compute_algo``, ``fp8_dot_product_attention``, ``fp8_multi_head_attention``).

    Raises:
        ValueError: If a name, field or value is unknown. The message lists the valid ones.
        TypeError: If it is not a recipe, name or mapping.
    """
    if isinstance(recipe, str):
        return _AS_NAMED[_class_of(recipe)]
    if isinstance(recipe, Mapping):
        fields = dict(recipe)
        if any(key in fields for key in _MEGATRON_KEYS) or _is_mxfp8(fields.get("fp8_format")):
            return _from_megatron(fields)
        if "class_path" in fields:  # a configuration that LightningCLI could not make
            return _from_class_path(**fields)
        return _from_fields(_class_of(fields.pop("name", "delayed")), fields)
    if isinstance(recipe, type) and recipe in RECIPES.values():
        raise TypeError(f"recipe is the class {recipe.__name__}; make one: {recipe.__name__}()")
    if not isinstance(recipe, tuple(RECIPES.values())):
        raise TypeError(f"recipe={recipe!r} is neither a recipe, a name ({_quoted(RECIPES)}), nor a mapping of fields")
    return recipe


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of ``recipe`` as plain values, which checkpoints hold."""
    return {**dataclasses.asdict(recipe), "fp8_format": recipe.fp8_format.name}


def described(fields: Mapping[str, Any]) -> str:
    """The name of the recipe with these ``fields``, and those that are not its defaults."""
    name = str(fields.get("name"))
    usual = fields_of(RECIPES[name]()) if name in RECIPES else {}
    changed = [f"{field}={value}" for field, value in fields.items() if usual.get(field, name) != value]
    return ", ".join([name, *changed])


def _class_of(name: Any) -> type[Recipe]:
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; use one of {_quoted(RECIPES)}")
    return RECIPES[name]


def _from_class_path(class_path: Any, init_args: Any = None, **others: Any) -> Recipe:
    classes = {f"lightning_fp8.{cls.__name__}": cls for cls in RECIPES.values()}
    if class_path not in classes:
        named = f"{_quoted(classes)}, or name instead: {_quoted(RECIPES)}"
        raise ValueError(f"class_path={class_path!r} is no recipe; use one of {named}")
    return _from_fields(classes[class_path], {**(init_args or {}), **others})


def _from_fields(cls: type[Recipe], fields: dict[str, Any]) -> Recipe:
    valid = _FIELDS[cls]
    fields = translated(cls.__name__, fields)
    for field in fields:
        if field not in valid:
            raise ValueError(unknown_name(cls.__name__, "field", field, valid))
    if isinstance(fields.get("fp8_format"), str):
        name = fields["fp8_format"]
        if name.upper() not in Format.__members__:
            supported = _quoted(each.name for each in cls._formats)
            raise ValueError(f"fp8_format={name!r} is unknown; use one of {supported}")
        fields["fp8_format"] = Format[name.upper()]
    return cls(**fields)


def _from_megatron(megatron_config: dict[str, Any]) -> Recipe:
    megatron_config = without_defaults(megatron_config)
    for key in megatron_config:
        if key not in (*_MEGATRON_KEYS, "fp8_format"):
            raise ValueError(f"{key!r} is not a Megatron FP8 key; the keys are {_quoted(_MEGATRON_KEYS)}")
    formats = [megatron_config[key] for key in ("fp8", "fp8_format") if key in megatron_config]
    if len(formats) == 2 and not _is_mxfp8(formats[1]):
        raise ValueError(f"fp8={formats[0]!r} and fp8_format={formats[1]!r} are the same field; pass one of them")
    is_mxfp8 = any(map(_is_mxfp8, formats))
    name = megatron_config.get("fp8_recipe", "mxfp8" if is_mxfp8 else "delayed")
    if is_mxfp8 and name != "mxfp8":
        raise ValueError(f"fp8_recipe={name!r} with the format 'mxfp8'; leave one of them out")
    own_format: dict[str, Any] = {}
    if formats and not is_mxfp8:  # Megatron passes its format to every recipe; a recipe that does not support it raises
        format_name = formats[0].name if isinstance(formats[0], Format) else formats[0]
        if not isinstance(format_name, str) or format_name.lower() not in _MEGATRON_FORMATS:
            raise ValueError(f"fp8={formats[0]!r} is unknown; use one of {_quoted(_MEGATRON_FORMATS)}")
        own_format["fp8_format"] = _MEGATRON_FORMATS[format_name.lower()]
    cls = _class_of(name)
    fields = {field: megatron_config[key] for key, field in _MEGATRON_FIELDS.items() if key in megatron_config}
    return cls(**{field: value for field, value in fields.items() if field in _FIELDS[cls]}, **own_format)


def _is_mxfp8(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "mxfp8"


def _quoted(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
