"""What makes compilation fast and changes no code: the inliner, nothing computed twice, no garbage collection."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import pytest

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.casts.quantize import quantize_rows_kernel
from cuda_kernels.device.tile import tensor_loader
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.emulated import needs_compilers
from tests.tiers import covering

KERNELS = {
    "amax": amax_kernel(tensor_loader("bfloat16", 1), False),
    "rows": quantize_rows_kernel(tensor_loader("float32", 4), "e4m3", True, True),
}


def ptx_of(kernel: Kernel) -> str:
    """Its PTX but for names of functions, which have a count of all that was compiled, and comments."""
    from cuda_kernels.lowering import compiler

    ptx = compiler.link(compiler.ltoir(kernel, "90a"), "90a", "ptx")[0].decode()
    return re.sub(r"_ZN\w+|//.*", "", ptx)


@needs_compilers
@pytest.mark.parametrize("name", covering(KERNELS, lambda name: {"amax"} & {name}))
def test_the_code_is_numbas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.core import inline_closurecall

    from cuda_kernels.lowering import compiler

    numbas = inline_closurecall.InlineWorker
    interpreted: Counter[FunctionType] = Counter()
    interpret = numbas.run_untyped_passes

    def counted(self: Any, func: FunctionType, enable_ssa: bool = False) -> Any:
        interpreted[func] += 1
        return interpret(self, func, enable_ssa)

    monkeypatch.setattr(numbas, "run_untyped_passes", counted)
    fast = ptx_of(KERNELS[name])
    assert interpreted
    assert set(interpreted.values()) == {1}
    interpreted.clear()
    assert inline_closurecall.InlineWorker is numbas
    for shortcut in ("fast_inlining", "fewer_repeats"):
        monkeypatch.setattr(compiler, shortcut, nullcontext)
    assert ptx_of(KERNELS[name]) == fast
    assert max(interpreted.values()) > 1, "Numba's own looks at functions again"


@needs_compilers
def test_a_call_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a function and types of arguments, in one compilation."""
    from cuda_kernels.lowering import compiler, repeats

    numbas, run = repeats._NUMBAS_CALL_TYPE, repeats._NUMBAS_RUN
    resolved: Counter[Any] = Counter()

    def counted(self: Any, context: Any, args: Any, kws: Any) -> Any:
        resolved[self, context, tuple(args), tuple(kws.items())] += 1
        return numbas(self, context, args, kws)

    monkeypatch.setattr(repeats, "_NUMBAS_CALL_TYPE", counted)
    monkeypatch.setattr(repeats._Callable, "get_call_type", counted)
    compiler.ltoir(KERNELS["amax"], "90a")
    assert set(resolved.values()) == {1}
    compiler.ltoir(KERNELS["amax"], "90a")
    assert max(resolved.values()) == 2, "nothing is kept for the next compilation"
    assert (repeats._Callable.get_call_type, repeats._Processor.run) == (counted, run), "Numba's own are back"


@needs_compilers
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile(enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda_kernels.lowering import compiler

    compiled = compiler.cuda.compile
    collections: list[str] = []

    def compile_or_fail(*args: Any, **options: Any) -> Any:
        code = compiled(*args, **options)
        assert not collections
        if fails:
            raise RuntimeError("as a compiler's error")
        return code

    monkeypatch.setattr(compiler.cuda, "compile", compile_or_fail)
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with pytest.raises(RuntimeError, match="as a compiler's error") if fails else nullcontext():
            compiler.ltoir(KERNELS["amax"], "90a")
        assert gc.isenabled() is enabled
    finally:
        gc.callbacks.pop()
        (gc.enable if was_enabled else gc.disable)()


@needs_compilers
def test_another_numba_is_told() -> None:
    program = """if 1:
        import warnings
        from numba.cuda.core import inline_closurecall, postproc
        inline_closurecall.InlineWorker.inline_ir = lambda self, something_else: None
        def run(self, something_else): pass
        postproc.PostProcessor.run = run
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            from cuda_kernels.lowering import compiler
        print(*(warning.message for warning in told))
        from contextlib import nullcontext
        assert compiler.fast_inlining is nullcontext
        assert compiler.fewer_repeats is nullcontext
    """
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "up to five times slower: Numba-CUDA's InlineWorker.inline_ir is another" in told.stdout
    assert "up to two times slower: Numba-CUDA's run is another" in told.stdout
