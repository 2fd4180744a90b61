"""Modules called ``transformer_engine...`` that are ours, on the CPU: a pytest plugin for Transformer Engine's tests.

Names come from ``lightning_fp8.transformer_engine``. One that does not exist there can be imported all the same, and
raises with its sentence where it is called or read, so that a file of tests is collected whatever it imports. What its
tests take for CUDA is the CPU, with compute capability 9.0. Of each test function few rows of parameters run, drawn by
a fixed seed, and models are small. Each test begins with a fixed seed, too; ``LIGHTNING_FP8_TE_SEED`` is another one.
``python -m pytest -p tests.peers.transformer_engine.shim FILE`` runs one by hand.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import types
from collections import defaultdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_fp8.transformer_engine import answers
from lightning_fp8.transformer_engine.common import recipe as our_recipes
from tests.peers.transformer_engine.page import core_sentences, sentences

SEED = 33
CORE = core_sentences()

# --- Names that do not exist ------------------------------------------------------------------------------------------


def refuse(name: str, said: str) -> None:
    raise NotImplementedError(f"{name} is not supported: {said}")


def _is_special(name: str) -> bool:
    return name.startswith("__")


def absent(name: str, said: str) -> Any:
    """What stands for a name: a function that refuses, or a class whose objects refuse all but their construction."""
    if name.lstrip("_")[0].islower():
        return lambda *args, **kwargs: refuse(name, said)

    class Class(type):
        def __getattr__(cls, attribute: str) -> Any:
            if _is_special(attribute):
                raise AttributeError(attribute)
            return cls()

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, said)

    def attribute_refused(self: Any, attribute: str) -> None:
        if _is_special(attribute):
            raise AttributeError(attribute)
        refuse(name, said)

    return Class(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": refused,
            "__getattr__": attribute_refused,
            "__reduce__": lambda self: (str, (name,)),
        },
    )


class GlobalState(metaclass=type("Global", (type,), {"__getattr__": lambda cls, name: absent(name, CORE["state"])})):
    """The global state that there is none of: resetting it changes nothing."""

    @staticmethod
    def reset() -> None:
        """Nothing to reset."""


_RECIPES = "transformer_engine.common.recipe"


def mutable(recipe: type) -> type:
    """The recipe, whose fields may be assigned after it is made; elsewhere ``dataclasses.replace`` does it."""
    return type(recipe.__name__, (recipe,), {"__setattr__": object.__setattr__, "__module__": _RECIPES})


OWN: dict[str, Any] = {
    "FP8GlobalStateManager": GlobalState,
    "is_fp8_available": lambda return_reason=False: (True, "") if return_reason else True,
    "is_fp8_block_scaling_available": lambda return_reason=False: (True, "") if return_reason else True,
    "is_mxfp8_available": lambda return_reason=False: (True, "") if return_reason else True,
    "is_nvfp4_available": lambda return_reason=False: (False, "four bits") if return_reason else False,
    "is_bf16_available": lambda return_reason=False: (True, "") if return_reason else True,
    "is_module_grouped_tensor_path_supported": lambda *args: False,
    "get_device_compute_capability": lambda: (9, 0),
    "init_method_normal": lambda sigma: lambda x: torch.nn.init.normal_(x, 0.0, sigma),
    "scaled_init_method_normal": lambda sigma, n: lambda x: torch.nn.init.normal_(x, 0.0, sigma / (2.0 * n) ** 0.5),
    "attention_mask_func": lambda scores, mask: scores.masked_fill(mask, -10000.0),
    "check_set_window_size": lambda attn_mask_type, window_size=None: window_size,
    "UNSAFE_PICKLE_EXTRA_STATE_ENV": "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
    "_attention_backends": {},
    **{name: mutable(getattr(our_recipes, name)) for name in our_recipes.__all__ if name.endswith("Scaling")},
}
SAID = answers.MODULES | answers.NAMES


class Module(types.ModuleType):
    """A module of Transformer Engine: our names, our stand-ins, and names that refuse."""

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if name in OWN:
            return OWN[name]
        ours = _ours(self.__name__)
        try:
            found = None if ours is None else getattr(ours, name)
        except AttributeError:
            found = None
        if isinstance(found, types.ModuleType):
            return importlib.import_module(f"{self.__name__}.{name}")
        if found is not None:
            return found
        part = next((each for each in reversed(self.__name__.split(".")) if each in answers.MODULES), "")
        made = absent(name, SAID.get(name) or answers.MODULES.get(part) or CORE["internal"])
        setattr(self, name, made)
        return made


def _ours(name: str) -> Any:
    try:
        return importlib.import_module(f"lightning_fp8.{name}")
    except ImportError:
        return None


class Finder(MetaPathFinder, Loader):
    """Finds a module for every name below ``transformer_engine``."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


# --- The CPU for CUDA -------------------------------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Functions of torch whose ``device`` is CUDA run on the CPU.

    There, LayerNorm of 16 bits sums the bias's gradient in 16 bits: it is computed in float32, as CUDA does.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.nn.functional.layer_norm and args[0].dtype != torch.float32:
            full = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
            of_weights = {name: each.float() for name, each in kwargs.items() if isinstance(each, torch.Tensor)}
            return function(*full, **{**kwargs, **of_weights}).to(args[0].dtype)
        return function(*args, **kwargs)


class Autocast(torch.autocast):
    """``torch.autocast``, of which CUDA is the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def put_cpu_for_cuda() -> None:
    cuda: Any = torch.cuda
    for name, value in {
        "synchronize": None,
        "manual_seed": None,
        "memory_allocated": 0.0,
        "max_memory_allocated": 0.0,
        "current_device": "cpu",
        "get_device_capability": (9, 0),
    }.items():
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    cuda.get_rng_state, cuda.set_rng_state = torch.get_rng_state, lambda state, *args: torch.set_rng_state(state)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.autocast = torch.amp.autocast = Autocast  # type: ignore[misc]
    OnCpu().__enter__()


# --- The plugin -------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported."""
    torch.set_num_threads(1)
    sys.meta_path.insert(0, Finder())
    put_cpu_for_cuda()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Few rows of each test function, in their order, and small models."""
    rows = int(os.environ.get("LIGHTNING_FP8_TE_ROWS", "12"))
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    drawn = random.Random(SEED)
    kept = {id(each) for of in by_function.values() for each in (drawn.sample(of, rows) if len(of) > rows else of)}
    config.stash[_COLLECTED] = len(items)
    items[:] = [item for item in items if id(item) in kept]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for configs in ("model_configs", "model_configs_inference"):
            for model in getattr(module, configs, {}).values():
                model.max_seqlen_q = model.max_seqlen_kv = min(model.max_seqlen_q, 64)
                model.num_heads = model.num_gqa_groups = min(model.num_heads, 4)
                model.num_layers = 1
                model.hidden_size = model.hidden_size_kv = model.num_heads * model.head_dim_qk


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same numbers in each run, whichever tests ran before."""
    seed = int(os.environ.get("LIGHTNING_FP8_TE_SEED", SEED))
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)


_COLLECTED = pytest.StashKey[int]()
_outcomes: dict[str, tuple[str, str]] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failure whose message has a sentence of the page is a refusal."""
    report = (yield).get_result()
    if call.excinfo is None:
        if report.when == "call":
            _outcomes[item.nodeid] = "passed", ""
        return
    text = f"{call.excinfo.typename}: {call.excinfo.value}"
    kind = "skipped" if report.outcome == "skipped" else "failed"
    if kind == "failed":
        kind = "refused" if any(each in text for each in sentences()) else kind
        kind = "core" if any(each in text for each in CORE.values()) else kind
    _outcomes[item.nodeid] = kind, text[:400]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what came of each test as JSON."""
    if path := os.environ.get("LIGHTNING_FP8_TE_REPORT"):
        with open(path, "w") as file:
            json.dump({"collected": session.config.stash.get(_COLLECTED, 0), "outcomes": _outcomes}, file, indent=1)
