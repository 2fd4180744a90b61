"""Op: an operation of ``torch.ops.lightning_fp8``, defined by one typed signature.

The signature is that of the function that returns the op's results on fake and meta tensors. It determines the schema,
the error under vmap, and the fast call, which bypasses torch's dispatcher if that would only select the device. The
dispatcher takes more host time than a launch.

A parameter may be a spec, a frozen description such as :class:`.Cast`. The schema contains the
fields of a spec one by one, while implementations and callers use the object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.autograd.profiler as _profiler
from torch import Tensor
from torch.nn import Parameter

from lightning_fp8.arguments import TRANSFORM_WAYS_OUT

NAMESPACE = "lightning_fp8"
UNOBSERVED = "_unobserved"
"""The suffix of the name of an op's twin, which does not have the optional tensors that the op may write to."""
OBSERVED = "scale", "amax"
"""The last parameters of an op that casts, which its signature declares as ``*observed: Tensor | None``."""

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    torch.device: "Device",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    str: "str",
    bool: "bool",
}

_Class = TypeVar("_Class", bound=type)

_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
_gradients: Callable[[], bool] = torch.is_grad_enabled
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
increment_version: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
_vmap_refusals = torch.library.Library(NAMESPACE, "IMPL")

_included_keys: Callable[[], Any] = torch._C._dispatch_tls_local_include_set  # type: ignore[attr-defined]
"""The dispatch keys that this thread includes: the default ones, and those of modes, transforms and tracers."""
with torch.inference_mode():
    _INFERENCE_KEYS = _included_keys().raw_repr()
_USUAL_KEYS = frozenset({_included_keys().raw_repr(), _INFERENCE_KEYS})
PLAIN_TENSORS = frozenset({Tensor, Parameter})


def is_watched() -> bool:
    """Whether torch's dispatcher does more with an op than select its implementation by device.

    It does while compiling, and if a mode, transform, tracer, profiler or gradient is active.
    """
    return (
        _compiling()
        or _gradients()
        or bool(_function_modes())
        or _included_keys().raw_repr() not in _USUAL_KEYS
        or _profiler._is_profiler_enabled  # on any thread
    )


class Op:
    """An operation, called with all arguments of its signature, in their order.

    Attributes:
        name: the op's name in ``torch.ops.lightning_fp8``.
        overload: the op with that name.
        implementations: the op's implementations by device type. All calls look them up here, including the
            dispatcher's.
        plans: the plan caches of the implementations that have one, by device type.
        writes: the positions of the arguments that it writes to.
        call: the op as a function of all arguments.
    """

    def __init__(
        self,
        name: str,
        signature: Callable[..., Any],
        check: Callable[..., None] | None,
        writes: Sequence[str],
        twin: bool,
    ) -> None:
        self.name = name
        self.implementations: dict[str, Callable[..., Any]] = {}
        self.plans: dict[str, Callable[..., Any]] = {}
        self._signature = signature
        self._check = check
        hints = get_type_hints(signature)
        self._returns = hints.pop("return")
        self._group = _group_of(self._returns)
        self._hints = hints
        defaults = [each.default for each in inspect.signature(signature).parameters.values()]
        if hints.pop("observed", None):
            hints |= dict.fromkeys(OBSERVED, Tensor | None)
            defaults[-1:] = [None] * len(OBSERVED)
            writes, twin = OBSERVED[1:], True
        self._defaults = tuple(defaults)
        self.writes = tuple(index for index, name in enumerate(self._hints) if name in writes)
        self.overload = self._define(self.name, self.writes, len(self._hints))
        self._twin = self._define(self.name + UNOBSERVED, (), self.writes[0]) if twin else None
        self.call = past_dispatcher(self)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _define(self, name: str, writes: Sequence[int], num_parameters: int) -> torch._ops.OpOverload:
        """Define an op of the first parameters, with its fake implementation and its error under vmap."""
        schema = []
        for index, (parameter, hint) in enumerate(list(self._hints.items())[:num_parameters]):
            if hint not in _SCHEMA_TYPES:
                schema.append(hint.schema)
                continue
            written = f"({'abcdefgh'[writes.index(index)]}!)" if index in writes else ""
            default = self._defaults[index]
            schema.append(
                f"{_SCHEMA_TYPES[hint].replace('Tensor', 'Tensor' + written)} {parameter}"
                + ("" if default is inspect.Parameter.empty else f"={default}")
            )
        torch.library.define(f"{NAMESPACE}::{name}", f"({', '.join(schema)}) -> {_results(self._returns)}")
        torch.library.register_fake(f"{NAMESPACE}::{name}", self._of_flat(self._signature))
        for key in ("FuncTorchBatched", "Batched"):  # the second is for torch.autograd.grad(is_grads_batched=True)
            _vmap_refusals.impl(name, _refuse_vmap, key)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    def implement(
        self, device_type: str, function: Callable[..., Any], plan: Callable[..., Callable[..., Any]] | None = None
    ) -> None:
        """Register the implementation for devices of ``device_type``, a function of the signature's parameters.

        Args:
            plan: the plan cache that the function uses, if it has one.
        """
        self.implementations[device_type] = function
        if plan is not None:
            self.plans[device_type] = plan

        def implemented(*args: Any) -> Any:
            return self.implementations[device_type](*args)

        for name in (self.name, self.name + UNOBSERVED) if self._twin else (self.name,):
            torch.library.impl(f"{NAMESPACE}::{name}", device_type, self._of_flat(implemented))

    def _of_flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel for the dispatcher: it checks the flat arguments, builds the specs and calls ``function``."""

        def called(*flat: Any) -> Any:
            args = self._unflattened(flat)
            self.check(*args)
            results = function(*args)
            return results if self._group is None else (*results[:-1], *results[-1])

        return called

    def check(self, *args: Any) -> None:
        """Check the arguments."""
        if self._check is not None:
            self._check(*args)

    def through_dispatcher(self) -> Callable[..., Any]:
        """A function that calls the op through the dispatcher, or its twin if the optional tensors are all None."""
        # Functions, because Dynamo of torch 2.8 does not trace properties of a NamedTuple.
        flat_of = {
            index: hint.flat.fget for index, hint in enumerate(self._hints.values()) if hint not in _SCHEMA_TYPES
        }
        overload, twin, writes = self.overload, self._twin, self.writes
        group = self._group
        num_results = 0 if group is None else len(get_args(self._returns)) - 1  # before the group

        def call(*args: Any) -> Any:
            chosen = overload
            if twin is not None and all(args[index] is None for index in writes):
                chosen, args = twin, args[: writes[0]]
            flat: list[Any] = []
            for index, arg in enumerate(args):
                if index in flat_of:
                    flat.extend(flat_of[index](arg))
                else:
                    flat.append(arg)
            results = chosen(*flat)
            return results if group is None else (*results[:num_results], group(*results[num_results:]))

        return call

    def _unflattened(self, flat: Sequence[Any]) -> list[Any]:
        """All arguments, given those of the dispatcher, which omits trailing defaults."""
        args: list[Any] = []
        start = 0
        for hint, default in zip(self._hints.values(), self._defaults):
            if hint in _SCHEMA_TYPES:
                args.append(flat[start] if start < len(flat) else default)
                start += 1
            else:
                stop = start + hint.schema.count(",") + 1
                args.append(hint.from_flat(*flat[start:stop]))
                start = stop
        return args

    def holding(self) -> tuple[int, ...]:
        """The positions of the specs that hold tensors."""
        specs = [(index, hint) for index, hint in enumerate(self._hints.values()) if hint not in _SCHEMA_TYPES]
        return tuple(index for index, hint in specs if "Tensor" in hint.schema)

    def types(self) -> list[frozenset[type]]:
        """The types of plain arguments of each parameter."""
        types = []
        for hint in self._hints.values():
            allowed = set(get_args(hint)) or {hint}
            types.append(frozenset(allowed | {Parameter} if Tensor in allowed else allowed))
        return types


def spec(schema: str) -> Callable[[_Class], _Class]:
    """Decorator that sets ``schema`` of a spec class (see :func:`op`), because a NamedTuple's body cannot."""

    def decorate(cls: _Class) -> _Class:
        cls.schema = schema  # type: ignore[attr-defined]
        return cls

    return decorate


def op(
    name: str, *, check: Callable[..., None] | None = None, writes: Sequence[str] = (), twin: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator of the function that returns an op's results on fake and meta tensors. Its signature is the op's.

    The parameters are tensors, numbers, dtypes and specs. An op that casts ends with ``*observed``, which are
    :data:`OBSERVED`; it writes to the amax, and has a twin. A spec class has ``schema``, its fields in the syntax
    of schemas, ``flat``, their values in this order, and ``from_flat(*values)``. The last of several results may be a
    NamedTuple of tensors, as in ``tuple[Tensor, Kept]``; the op of the dispatcher returns its fields one by one.

    Args:
        check: a function of the same arguments that raises if they are invalid. Each call checks once.
        writes: the parameters that the op writes to.
        twin: whether to define the op a second time, as ``name`` + :data:`UNOBSERVED`, without the parameters from the
            first of ``writes`` on, which must be optional. Inductor does not support operations on E8M0, and its
            wrapper of an op that may write to an argument is one. So an op that returns E8M0 scales must not write to
            arguments.
    """
    return lambda signature: Op(name, signature, check, writes, twin)


def past_dispatcher(op: Op) -> Callable[..., Any]:
    """A function that calls an op's implementation directly if the dispatcher would only select it by device.

    This is the case if :func:`is_watched` is False, as inside an ``autograd.Function``, and all arguments are plain.
    The version counters of arguments that the op writes to are incremented. Kernels that a ``torch.library.Library``
    registers to override this package's are not called.

    Args:
        op: an op whose first argument is a tensor, and whose other tensors are on the same device.
    """
    implementations, check, writes, expected = op.implementations, op._check, op.writes, op.types()
    holding = op.holding()
    through_dispatcher = op.through_dispatcher()
    known: set[tuple[type, ...]] = set()  # types of arguments that have been checked

    def are_as_expected(types: tuple[type, ...]) -> bool:
        if len(types) == len(expected) and all(given in allowed for given, allowed in zip(types, expected)):
            known.add(types)
            return True
        return False

    def call(*args: Any) -> Any:
        if (
            is_watched()
            or ((types := tuple(map(type, args))) not in known and not are_as_expected(types))
            or (holding and not all(_holds_plain_tensors(args[index]) for index in holding))
        ):
            return through_dispatcher(*args)
        x = args[0]
        implementation = implementations["cuda"] if x.is_cuda else implementations["cpu"] if x.is_cpu else None
        if implementation is None or x.is_neg():  # is_neg: the negative bit
            return through_dispatcher(*args)
        if check is not None:
            check(*args)
        results = implementation(*args)
        for index in writes:
            if args[index] is not None:
                increment_version((args[index],))
        return results

    return call


def _results(hint: Any) -> str:
    """The results in a schema for a function that returns ``hint``: a tensor, a tuple of tensors, or None."""
    return "Tensor" if hint is Tensor else f"({', '.join(_result_types(hint))})"


def _result_types(hint: Any) -> list[str]:
    if hint in (Tensor, type(None)):
        return ["Tensor"] if hint is Tensor else []
    if hasattr(hint, "_fields"):
        return [f"Tensor {name}" for name in hint._fields]
    assert get_origin(hint) is tuple
    return [each for part in get_args(hint) for each in _result_types(part)]


def _group_of(hint: Any) -> type | None:
    """The type of the last of several results if it is a NamedTuple, else None."""
    *_, last = get_args(hint) or (None,)
    return last if hasattr(last, "_fields") else None


def _holds_plain_tensors(spec: Any) -> bool:
    return all(type(each) in PLAIN_TENSORS for each in spec.flat if isinstance(each, Tensor))


def _refuse_vmap(*args: object) -> None:
    """Raise a clear error: vmap's fallback loop does not support ops that write to an argument."""
    raise RuntimeError(f"FP8 ops do not run under vmap, is_grads_batched=True or vectorize=True; {TRANSFORM_WAYS_OUT}")
