"""Imports follow one arrow, plugin → convert → modules → functions → ops → kernels, and never turn back."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _files(package: str) -> dict[str, Path]:
    """Dotted name to file of every module of ``package``."""
    files = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def _imports(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Dotted names that ``tree`` imports anywhere in it, also inside functions; ``a.b`` for ``from a import b``."""
    found: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


FILES = _files("lightning_fp8") | _files("cuda_kernels")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def _imported_by(module: str) -> set[str]:
    return _imports(_tree(module), module, FILES[module].name == "__init__.py")


def _reached(module: str) -> set[str]:
    """Modules of ours that importing ``module`` needs, whatever ``lightning_fp8/__init__`` pulls in aside."""
    reached: set[str] = set()
    todo = [module]
    while todo:
        new = {name for name in _imported_by(todo.pop()) if name in FILES and name not in ("lightning_fp8", *reached)}
        reached |= new
        todo += new
    return reached


def _in_room(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def _room_of(module: str) -> str:
    """The room of a module of lightning_fp8: the folder or file directly under the package that it is in."""
    return module.split(".")[1]


def _room(name: str) -> list[str]:
    modules = [module for module in FILES if _is_ours(module) and _room_of(module) == name]
    assert modules, f"lightning_fp8.{name} does not exist"
    return modules


IMPORT_PATHS = {"lightning_fp8.parallel.styles": "lightning_fp8.sharding.styles"}
"""Public import paths of files that are in a room above."""


def _is_ours(module: str) -> bool:
    """Whether ``module`` is in a room of lightning_fp8."""
    return module.startswith("lightning_fp8.") and module not in IMPORT_PATHS


def test_the_parser_sees_every_kind_of_import() -> None:
    source = """
import torch.nn as nn
from lightning_fp8 import ops
from . import history
from ..formats import E4M3
from .linear import Linear
def later():
    import lightning.pytorch
"""
    assert _imports(ast.parse(source), "lightning_fp8.modules.x", is_package=False) == {
        "torch.nn",
        "lightning_fp8",
        "lightning_fp8.ops",
        "lightning_fp8.modules",
        "lightning_fp8.modules.history",
        "lightning_fp8.formats",
        "lightning_fp8.formats.E4M3",
        "lightning_fp8.modules.linear",
        "lightning_fp8.modules.linear.Linear",
        "lightning.pytorch",
    }
    assert _imports(ast.parse("from . import a"), "lightning_fp8.ops", is_package=True) == {
        "lightning_fp8.ops",
        "lightning_fp8.ops.a",
    }


def test_the_arrow_points_from_plugin_to_ops() -> None:
    assert "lightning_fp8.plugin.precision" in _reached("lightning_fp8.callbacks")
    assert "lightning_fp8.convert.conversion" in _reached("lightning_fp8.plugin.precision")
    assert "lightning_fp8.modules.linear" in _reached("lightning_fp8.convert.conversion")
    assert "lightning_fp8.functions.linear" in _reached("lightning_fp8.modules.linear")
    assert "lightning_fp8.ops" in _reached("lightning_fp8.functions.linear")


VALUES = {
    "version": set(),
    "arguments": set(),
    "capture": set(),
    "notices": set(),
    "optimizer_steps": {"capture"},
    "threads": set(),
    "traced": set(),
    "files": set(),
    "foreign_names": set(),
    "faster": set(),
    "numerics": {"arguments"},
    "names": {"numerics"},
}
"""Values, formulas and checks that every room may import, and what they import of each other."""

ROOMS = {
    "ops": set(),
    "te": set(),
    "delayed": {"ops"},
    "weights": {"ops"},
    "functions": {"delayed", "ops", "weights"},
    "fp8_region": {"delayed", "functions"},
    "parallel": {"functions", "ops", "weights"},
    "modules": {"delayed", "fp8_region", "functions", "ops", "parallel", "te", "weights"},
    "attention": {"delayed", "fp8_region", "functions", "modules", "ops", "parallel", "te"},
    "sharding": {"delayed", "fp8_region", "functions", "modules", "ops", "parallel", "weights"},
    "export": {"attention", "delayed", "fp8_region", "ops"},
    "transformer": {"attention", "modules", "te"},
    "convert": {
        "attention",
        "delayed",
        "fp8_region",
        "functions",
        "modules",
        "ops",
        "parallel",
        "sharding",
        "weights",
    },
    "proofs": {"attention", "ops"},
    "doctor": {"ops", "proofs"},
    "te_checkpoints": {"convert", "delayed", "modules", "parallel", "te", "transformer"},
    "torchao": {"convert", "fp8_region", "modules", "sharding"},
    "transformer_engine": {
        "attention",
        "delayed",
        "export",
        "fp8_region",
        "modules",
        "ops",
        "parallel",
        "transformer",
        "weights",
    },
    "hf_trainer": {"convert", "delayed", "modules"},
    "plugin": {
        "convert",
        "delayed",
        "fp8_region",
        "modules",
        "parallel",
        "ops",
        "proofs",
        "sharding",
        "te",
        "te_checkpoints",
        "weights",
    },
    "callbacks": {"plugin"},
    "monitor": {"delayed", "modules", "ops", "plugin"},
    "sensitivity": {"convert", "delayed", "fp8_region", "modules"},
    "cli": {
        "delayed",
        "doctor",
        "fp8_region",
        "modules",
        "monitor",
        "ops",
        "plugin",
        "sensitivity",
        "te",
        "te_checkpoints",
    },
    "__main__": {"cli"},
}
"""The rooms of lightning_fp8 upwards, and what each may import of those below it beside values."""

PLUGIN = ("plugin", "callbacks", "monitor", "cli")
"""The rooms that know Lightning."""


def _rooms_of(module: str) -> set[str]:
    return {_room_of(name) for name in _imported_by(module) & set(FILES) if _is_ours(name)}


@pytest.mark.parametrize("room", [*VALUES, *ROOMS])
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    below = VALUES[room] if room in VALUES else {*VALUES, *ROOMS[room]}
    for module in _room(room):
        assert _rooms_of(module) <= below | {room}, module


def test_no_rooms_import_each_other() -> None:
    order = [*VALUES, *ROOMS]
    for room, below in {**VALUES, **ROOMS}.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def test_no_files_import_each_other() -> None:
    """A file that imports a module of a package needs the package's ``__init__``, but none of its names."""
    modules = {name: _imported_by(name) & set(FILES) for name in FILES}
    needed = {
        name: {each for each in found if not any(other.startswith(f"{each}.") for other in found)}
        for name, found in modules.items()
    }
    assert [*TopologicalSorter(needed).static_order()]  # which raises a CycleError that names the files


@pytest.mark.parametrize("module", IMPORT_PATHS)
def test_an_import_path_only_gives_the_names_of_another_file(module: str) -> None:
    assert [type(node) for node in _tree(module).body] == [ast.Expr, ast.ImportFrom]
    assert _imported_by(module) == {IMPORT_PATHS[module], f"{IMPORT_PATHS[module]}.*"}
    assert not [name for name in FILES if module in _imported_by(name)]


def test_every_module_is_in_a_room() -> None:
    assert {_room_of(module) for module in FILES if _is_ours(module)} == {*VALUES, *ROOMS}


def test_transformer_engines_files_are_read_without_the_rest() -> None:
    """Bytes to values: what reads them needs the roles of tensors alone, and the names of slots for them."""
    ours = {name for name in _reached("lightning_fp8.te.te_state") if not _in_room(name, "lightning_fp8.te")}
    assert ours == {
        "lightning_fp8.numerics.scaled",
        "lightning_fp8.names",
        "lightning_fp8.numerics.formats",
        "cuda_kernels.device.sizes",
    }


CORE = ("op", "plans", "proving", "memory", "checks", "compiled", "bf16_products", "torch_scaled_mm")
"""Modules of ops that know no operation."""

OPERATIONS = {"cast": set(), "gemm": {"cast"}, "norm": {"cast", "column_sums"}, "activation": {"cast", "column_sums"},
              "scales": set(), "transpose": set(), "sample": {"cast"}, "linear": {"cast", "gemm"},
              "grouped": {"cast", "gemm", "transpose"}}  # fmt: skip
"""The operations, each in a file, or in two where kernels take one, and what they know beside the core."""

OP_MODULES = [name.removeprefix("lightning_fp8.ops.") for name in FILES if name.startswith("lightning_fp8.ops.")]


def _ops_imported_by(module: str) -> set[str]:
    """The modules of ops that one of them imports, those of one operation under its name."""
    imported = _imported_by(f"lightning_fp8.ops.{module}") & set(FILES)
    of_ops = {name.removeprefix("lightning_fp8.ops.") for name in imported if name.startswith("lightning_fp8.ops.")}
    return {name.removesuffix("_cuda") for name in of_ops}


def test_every_module_of_ops_is_of_an_operation_or_of_the_core() -> None:
    assert {name.removesuffix("_cuda") for name in OP_MODULES} == {*CORE, "column_sums", *OPERATIONS}


@pytest.mark.parametrize("module", OP_MODULES)
def test_an_operation_knows_no_other_one(module: str) -> None:
    """All know the core, and some may cast; the core knows none, and what specifies an op not its kernels."""
    operation = module.removesuffix("_cuda")
    allowed = {*CORE, operation, *OPERATIONS.get(operation, ())}
    if operation not in OPERATIONS:
        allowed = {*CORE}
    assert _ops_imported_by(module) <= allowed, module
    if not module.endswith("_cuda"):
        kernels = {name for name in _imported_by(f"lightning_fp8.ops.{module}") if name.endswith("_cuda")}
        assert not kernels, module


def test_kernels_know_neither_the_package_nor_torch_nn() -> None:
    kernels = [name for name in FILES if _in_room(name, "cuda_kernels")]
    assert "cuda_kernels" in kernels
    for module in kernels:
        wrong = {
            name
            for name in _imported_by(module)
            for room in ("lightning_fp8", "lightning", "torch.nn", "torch.autograd")
            if _in_room(name, room)
        }
        assert not wrong, f"{module} imports {sorted(wrong)}"


KERNEL_ROOMS = {
    "references": set(),
    "device": set(),
    "kernel": {"device"},
    "casts": {"kernel", "device"},
    "norm": {"kernel", "device"},
    "gemm": {"kernel", "device"},
    "attention": {"kernel", "device"},
    "lowering": {"kernel", "device", "references"},
    "host": {"kernel", "device", "references", "gemm", "lowering"},
    "attention.host": {"kernel", "device", "attention", "host"},
}
"""What each room of cuda_kernels may import of the others."""


def _kernel_room_of(module: str) -> str:
    return max((room for room in KERNEL_ROOMS if _in_room(module, f"cuda_kernels.{room}")), key=len)


@pytest.mark.parametrize("room", KERNEL_ROOMS)
def test_rooms_of_kernels(room: str) -> None:
    modules = [name for name in FILES if name.startswith("cuda_kernels.") and _kernel_room_of(name) == room]
    assert modules
    for module in modules:
        rooms = {
            _kernel_room_of(name) for name in _imported_by(module) & set(FILES) if name.startswith("cuda_kernels.")
        }
        assert rooms <= KERNEL_ROOMS[room] | {room}, module
        foreign = {name.split(".")[0] for name in _imported_by(module)}
        assert room.endswith("host") or "torch" not in foreign, module
        assert room == "lowering" or not foreign & {"numba", "llvmlite"}, module


def test_every_kernel_module_is_in_a_room() -> None:
    assert {_kernel_room_of(name) for name in FILES if name.startswith("cuda_kernels.")} == set(KERNEL_ROOMS)


def test_only_plugin_callbacks_and_command_line_know_lightning() -> None:
    knowing = {
        module
        for module in FILES
        if any(
            _in_room(name, package) for name in _imported_by(module) for package in ("lightning", "pytorch_lightning")
        )
    }
    assert "lightning_fp8.plugin.precision" in knowing
    rooms = PLUGIN
    assert not [name for name in knowing if not any(_in_room(name, f"lightning_fp8.{room}") for room in rooms)]


def test_what_is_large_is_imported_on_first_use_only() -> None:
    """The command line starts without Lightning and torch; the plugin's names bring them in. Kernels are declared and
    started without a compiler."""
    modules = [name for name in FILES if _in_room(name, "cuda_kernels") and not _in_room(name, "cuda_kernels.lowering")]
    code = """
import sys
from importlib import import_module
import lightning_fp8, lightning_fp8.cli.main
assert not {"lightning", "pytorch_lightning", "torch"} & set(sys.modules), "imported too early"
for module in sys.argv[1:]:
    import_module(module)
assert not {"numba", "llvmlite"} & set(sys.modules)
import lightning_fp8.convert.conversion
assert not {"lightning", "pytorch_lightning"} & set(sys.modules), "imported too early"
assert lightning_fp8.ops.quantize.__module__ == "lightning_fp8.ops.cast"
assert set(lightning_fp8.__all__) <= set(dir(lightning_fp8))
from lightning_fp8 import *
assert FP8Precision is lightning_fp8.FP8Precision and "lightning" in sys.modules
assert {name for name in lightning_fp8.__all__ if not hasattr(lightning_fp8, name)} == set()
try:
    lightning_fp8.FP8Precison
except AttributeError as error:
    assert "module 'lightning_fp8' has no attribute 'FP8Precison'" in str(error)
else:
    raise AssertionError("a wrong name was found")
"""
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


ALLOCATE = {"empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"}


def test_no_op_allocates_in_the_default_dtype() -> None:
    """It is the caller's: the Trainer sets that of the weights."""
    found = [
        f"{module}:{node.lineno}"
        for module in FILES
        if _in_room(module, "lightning_fp8.ops") or ".host" in module
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in ALLOCATE) == ("torch", True)
        and "dtype" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found


def test_only_formats_says_the_largest_values() -> None:
    saying = {
        module
        for module in FILES
        if _in_room(module, "lightning_fp8")
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in (448, 57344)
    }
    assert saying == {"lightning_fp8.numerics.formats"}
