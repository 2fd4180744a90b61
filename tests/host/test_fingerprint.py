"""A kernel's key changes when anything that is compiled into it does, and for nothing else: tried on copies."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cuda_kernels.device.language import UniTuple, asm, device, f32, i32, lowered
from cuda_kernels.host import compile_cache
from cuda_kernels.host.compile_cache import fingerprint
from cuda_kernels.kernel import Kernel
from tests.tiers import covering

ROOT = Path(__file__).parents[2]

KEYS = """
import json, sys
class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in ("numba", "llvmlite", "torch"), name
sys.meta_path.insert(0, NoCompiler())
from cuda_kernels.attention import forward
from cuda_kernels.attention.backward import delta, dkv, dq
from cuda_kernels.attention.casts import cast as heads_cast, heads, means
from cuda_kernels.attention.mma import dkv as mma_dkv, dq as mma_dq
from cuda_kernels.attention.mma import forward as mma_forward
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.casts import activation, amax, column_sums, quantize, quantize_blocks, update_scales
from cuda_kernels.casts import transpose as codes
from cuda_kernels.device import tile
from cuda_kernels.gemm import mma, wgmma
from cuda_kernels.gemm.spec import MmaConfig, GemmSpec, Scaling, GemmConfig
from cuda_kernels.host import compile_cache
from cuda_kernels.norm import backward, cast, rows, statistics
rms, spread = statistics.NormSpec("bfloat16", "bfloat16", False, False), rows.cast_row_layout("bfloat16", 4096)
plain, products = tile.tensor_loader("bfloat16", 4), [GemmSpec("e4m3", "e4m3", each, "bfloat16") for each in Scaling]
sums = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "float32", accumulate=True, promote=False)
kernels = {
    "amax": amax.amax_kernel(plain, True),
    "row_amax": amax.row_amax_kernel(plain, True, True),
    "quantize": quantize.quantize_tensor_kernel(plain, "e4m3", True, True, True),
    "quantize_rows": quantize.quantize_rows_kernel(plain, "e4m3", True, True),
    "quantize_columns": quantize.quantize_columns_kernel(plain, "e4m3"),
    "transpose": codes.transpose_kernel(4),
    "quantize_blocks": quantize_blocks.quantize_blocks_kernel(plain, "e4m3", (1, 32), True, True, True),
    "quantize_gelu": quantize.quantize_tensor_kernel(
        activation.activation_loader("gelu", "bfloat16", True), "e4m3", True, True, True),
    "quantize_gated_gelu": quantize.quantize_tensor_kernel(
        activation.gated_loader("gelu", "bfloat16", True), "e4m3", True, True, True),
    "quantize_norm": quantize.quantize_tensor_kernel(
        statistics.normalized_loader(rms, True), "e4m3", True, True, True),
    "sums": column_sums.column_sums_kernel("float32"),
    "statistics": statistics.statistics_of_rows_kernel("bfloat16", False, spread),
    "normalize": cast.normalize_kernel(rms, "e4m3", spread, True),
    "norm_backward": backward.norm_backward_kernel(
        rms, "bfloat16", backward.backward_row_layout(("bfloat16", "bfloat16"), 4096)),
    "scales": update_scales.update_scales_kernel(False),
    **{
        f"hopper {each.scaling.value}": wgmma.gemm_kernel(each, GemmConfig(2, 2, 128, 4))
        for each in products
    },
    "hopper sums": wgmma.gemm_kernel(sums, GemmConfig(2, 1, 256, 4)),
    "mma": mma.mma_gemm_kernel(products[0], MmaConfig(64, 64, 3)),
    "attention_forward": forward.attention_forward_kernel(AttentionSpec(64, "bfloat16")),
    "attention_forward_128": forward.attention_forward_kernel(AttentionSpec(128, "bfloat16")),
    "quantize_gradients": delta.quantize_gradients_kernel(heads.HeadsSpec(64, "bfloat16", 4)),
    "attention_dq": dq.attention_dq_kernel(AttentionSpec(64, "bfloat16")),
    "attention_dkv": dkv.attention_dkv_kernel(AttentionSpec(64, "bfloat16")),
    "attention_dq_256": dq.attention_dq_kernel(AttentionSpec(256, "bfloat16")),
    "attention_dkv_256": dkv.attention_dkv_256_kernel(AttentionSpec(256, "bfloat16"), "dk"),
    "attention_mma_forward": mma_forward.mma_attention_forward_kernel(AttentionSpec(64, "bfloat16")),
    "attention_mma_forward_256": mma_forward.mma_attention_forward_kernel(AttentionSpec(256, "bfloat16")),
    "attention_mma_dq": mma_dq.mma_attention_dq_kernel(AttentionSpec(64, "bfloat16")),
    "attention_mma_dkv": mma_dkv.mma_attention_dkv_kernel(AttentionSpec(64, "bfloat16")),
    "attention_mma_dq_256": mma_dq.mma_attention_dq_kernel(AttentionSpec(256, "bfloat16")),
    "attention_mma_dkv_256": mma_dkv.mma_attention_dkv_kernel(AttentionSpec(256, "bfloat16"), "dk"),
    "transpose_heads": heads_cast.transpose_heads_kernel(64),
    "quantize_heads": heads_cast.quantize_heads_kernel(heads.HeadsSpec(64, "bfloat16", 4), True, True, True),
    "sum_heads": means.sum_heads_kernel(heads.HeadsSpec(64, "bfloat16", 4)),
    "mean_heads": means.mean_heads_kernel(64),
}
print(json.dumps({name: compile_cache.source_key(kernel, "cubin", "90a") for name, kernel in kernels.items()}))
"""


def keys(folder: Path) -> dict[str, str]:
    """Of some of each kind of kernel, of the package in ``folder``; no compiler can be imported meanwhile."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", KEYS], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Before(NamedTuple):
    """The keys of the package as it is, and a copy of it that Python has compiled."""

    keys: dict[str, str]
    folder: Path


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    """The same wherever the package lies."""
    here = keys(ROOT)
    assert len(set(here.values())) == len(here)
    folder = copied(ROOT, tmp_path_factory.mktemp("copy"))
    assert keys(folder) == here
    return Before(here, folder)


def copied(source: Path, folder: Path) -> Path:
    """``folder`` with a copy of ``source``'s package; Python takes what it has compiled there of unchanged files."""
    written_meanwhile = shutil.ignore_patterns("__pycache__") if source == ROOT else None
    shutil.copytree(source / "cuda_kernels", folder / "cuda_kernels", ignore=written_meanwhile)
    return folder


CASTS = {"quantize", "quantize_rows", "quantize_blocks", "quantize_gelu", "quantize_gated_gelu", "quantize_norm"}
CASTS |= {"normalize"}
PRODUCTS = {"hopper tensor", "hopper row", "hopper 1x128 128x128", "hopper 1x128 1x128", "hopper sums"}
GEMMS = {"mma", *PRODUCTS}
ATTENTION = {f"attention_{name}" for name in ("forward", "forward_128", "dq", "dkv", "dq_256", "dkv_256")}
ATTENTION |= {f"attention_mma_{name}" for name in ("forward", "forward_256", "dq", "dkv", "dq_256", "dkv_256")}
ATTENTION |= {f"{name}_heads" for name in ("quantize", "sum", "mean", "transpose")} | {"quantize_gradients"}
EDITS = [
    ("casts/activation.py", "0.044715)", "0.044716)", {"quantize_gelu", "quantize_gated_gelu"}),
    ("norm/statistics.py", "x = x * rstd * weight", "x = x * (rstd * weight)", {"quantize_norm", "normalize"}),
    (
        "casts/quantize.py",
        "b * scale_b, c * scale_c",
        "c * scale_b, b * scale_c",
        {name for name in CASTS if name.startswith("quantize")},
    ),
    ("gemm/raster.py", "_BAND = 8", "_BAND = 4", GEMMS),
    ("gemm/epilogue.py", "thread >> 5) * 16", "thread >> 5) * 8", set()),  # stores from registers are in none of these
    ("gemm/epilogue.py", "start + 2 * (lane & 3)", "start + 4 * (lane & 3)", PRODUCTS),
    ("gemm/spec.py", '("out", buffers * EPI_TILE_BYTES)', '("out", 2 * buffers * EPI_TILE_BYTES)', PRODUCTS),
    ("gemm/spec.py", "EPI_TILE_BYTES = 64 * ROW_BYTES", "EPI_TILE_BYTES = 128 * ROW_BYTES", PRODUCTS),
    (
        "device/ptx.py",
        "cvt.rn.satfinite.{name}x2.f32 lo",
        "cvt.rn.satfinite.{name}x2.f32  lo",
        CASTS | GEMMS | {"quantize_columns"},
    ),
    ("device/ptx.py", '"cvt.rn.bf16x2.f32"', '"cvt.rn.relu.bf16x2.f32"', GEMMS | {"norm_backward"}),
    ("device/ptx.py", '"cvt.rn.bf16.f32"', '"cvt.rn.relu.bf16.f32"', GEMMS),
    ("device/fragments.py", "return UniTuple(f32, num_registers)", "return UniTuple(f32, 1 * num_registers)", GEMMS),
    ("device/language.py", 'u32: Any = Type("uint32")', 'u32: Any = Type("int32")', None),
    ("kernel.py", "number = int(digits[:-1])", "number = 1 + int(digits[:-1])", None),
    ("references.py", "sorted(", "list(", None),
    ("device/sm90.py", "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned ;", PRODUCTS),
    ("lowering/fragments.py", "mma.sync.aligned.m16n8k32", "mma.sync.aligned.m16n8k32 ", GEMMS),
    ("casts/update_scales.py", "SLOTS = 32", "SLOTS = 16", {"scales"}),
    ("lowering/compiler.py", 'output="ltoir"', 'output="ltoir" ', None),
]


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    covering(EDITS, lambda edit: {"casts/activation.py", "gemm/raster.py", "kernel.py"} & {edit[0]}),
    ids=[f"{edit[0]}: {edit[2]}" for edit in EDITS],
)
def test_an_edit_changes_the_keys_of_what_it_is_fused_into(
    name: str, old: str, new: str, changed: set[str] | None, before: Before, tmp_path: Path
) -> None:
    """``changed``: of what is not attention's exactly these; None: all, attention's too.

    Stores of fragments take their instructions from ``device/ptx.py``, of which each edit counts for them.
    """
    path = copied(before.folder, tmp_path) / "cuda_kernels" / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = keys(tmp_path)
    found = {each for each, key in before.keys.items() if key != after[each]}
    assert changed is None or found - ATTENTION == changed, (found - ATTENTION) ^ changed
    assert changed is not None or found == set(before.keys)


WORDS = ["sm90"]
"""Of ``device``: instructions. What their functions return counts, not their bodies."""
PLANS = ["gemm/spec.py", *(f"attention/{name}.py" for name in ("spec", "backward/memory", "backward/statistics"))]
"""Descriptions and offsets, computed before a kernel is made: the values that it names count."""
MODULES = [path.relative_to(ROOT / "cuda_kernels").as_posix() for path in sorted((ROOT / "cuda_kernels").rglob("*.py"))]


def in_every_body(source: str) -> str:
    """``source`` with one more statement in each of its functions."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef))]
    for statement in sorted((body[-1] for body in bodies), key=lambda node: -node.lineno):
        lines.insert(statement.lineno - 1, " " * statement.col_offset + "pass\n")
    return "".join(lines)


def is_compiled(module: str) -> bool:
    """Whether anything of what its functions say is compiled into a kernel."""
    room, _, name = module.removesuffix(".py").rpartition("/")
    only_host = "host" in room.split("/") or name == "__init__"
    return not (only_host or (room == "device" and name in WORDS) or module in PLANS)


def edited(folder: Path, *modules: str) -> Path:
    for path in (folder / "cuda_kernels" / module for module in modules):
        path.write_text(in_every_body(path.read_text()))
    return folder


@pytest.mark.parametrize(
    "module", covering(filter(is_compiled, MODULES), lambda module: {"casts/quantize.py"} & {module})
)
def test_an_edit_of_all_functions_of_a_kernels_module_changes_keys(module: str, before: Before, tmp_path: Path) -> None:
    assert keys(edited(copied(before.folder, tmp_path), module)) != before.keys


def test_edits_of_all_other_modules_change_no_key(before: Before, tmp_path: Path) -> None:
    others = [module for module in MODULES if not is_compiled(module)]
    assert keys(edited(copied(before.folder, tmp_path), *others)) == before.keys


class Box(NamedTuple):
    rows: int
    columns: int


def test_what_a_function_names_counts() -> None:
    def call(one: object) -> Callable[[float], float]:
        return lambda x: one + x  # type: ignore[operator, no-any-return]

    twice = asm("add.f32 $0, $1, $1;", f32, f32)
    words = [1, 2, 1.0, True, np.float32(1), np.float64(1), (1, 2), (2, 1), i32, f32, UniTuple(f32, 2), None, "1"]
    words += [twice, asm("add.f32 $0, $1, $1;", f32, f32, pure=True), device(call(1)), device(call(2)), np]
    words += [lowered("fragments", "zeros")(4), lowered("fragments", "zeros")(8), lowered("fragments", "add")(4)]
    texts = [fingerprint(call(word)) for word in words]
    assert len(set(texts)) == len(texts)
    assert fingerprint(call(device(call(1)))) == fingerprint(call(device(call(1))))
    # What these hold is reached by the names of attributes, which are no part of a function's references.
    for word in ([1], compile_cache, Kernel, Box(1, 2)):
        with pytest.raises(TypeError, match=re.escape(f"names {word!r}; it may name numbers")):
            fingerprint(call(word))


@pytest.mark.parametrize("module", MODULES)
def test_a_lambda_is_told_from_others_by_its_lines(module: str) -> None:
    """Of a lambda's text, inspect gives all lines, if none ends outside of brackets, and nothing but its lines."""
    path = ROOT / "cuda_kernels" / module
    lines = path.read_text().splitlines(keepends=True)
    found = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Lambda)]
    assert len({node.lineno for node in found}) == len(found)
    for node in found:
        assert len(inspect.getblock(lines[node.lineno - 1 :])) == node.end_lineno - node.lineno + 1, node.lineno


def test_a_file_that_is_edited_after_its_import_gives_another_key(tmp_path: Path) -> None:
    """Numba compiles what was imported, not what the file says by now."""
    folder = copied(ROOT, tmp_path)
    program = """
import sys
from pathlib import Path
from cuda_kernels.gemm import mma, raster
from cuda_kernels.host import compile_cache
from cuda_kernels.gemm.spec import MmaConfig, GemmSpec, Scaling
path = Path(raster.__file__)
if "early" in sys.argv:
    path.write_text(path.read_text().replace("band * _BAND + ", "band * _BAND + 0 + "))
kernel = mma.mma_gemm_kernel(GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16"), MmaConfig(64, 64, 3))
print(compile_cache.cache_key(kernel, "cubin", "89"))
"""
    found = [
        subprocess.run([sys.executable, "-c", program, *late], cwd=folder, capture_output=True, text=True, check=True)
        for late in (["early"], [])
    ]
    assert found[0].stdout != found[1].stdout


def test_keys_do_not_depend_on_how_numpy_writes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with np.printoptions(legacy="1.25"):
        before = fingerprint(np.float32(0.1))
    assert before == fingerprint(np.float32(0.1)) != fingerprint(np.float64(np.float32(0.1)))


def test_launch_bounds_and_parameters_count() -> None:
    def kernel(x):  # type: ignore[no-untyped-def]
        pass

    declared = [
        Kernel("a", kernel, {"x": i32}, 32),
        Kernel("a", kernel, {"x": f32}, 32),
        Kernel("a", kernel, {"x": i32}, 64),
        Kernel("a", kernel, {"x": i32}, 32, min_blocks_per_sm=2),
        Kernel("b", kernel, {"x": i32}, 32),
    ]
    found = {compile_cache.source_key(each, "cubin", arch) for each in declared for arch in ("90a", "89")}
    assert len(found) == 9  # side by side on cards with GDDR memory: 2 - 1 = 1
