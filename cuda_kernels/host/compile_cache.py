"""The compile cache: a kernel's machine code is carried here, kept on disk, or compiled; and it has a key.

:mod:`cuda_kernels.host.cache_folder` has the files, :mod:`cuda_kernels.lowering.compiler` compiles. A key is a hash of
the kernel's source (:mod:`cuda_kernels.host.fingerprint`), its launch bounds, the architecture and the compilers.
"""

from __future__ import annotations

import hashlib

from cuda_kernels.host.cache_folder import cached, carried, compilers
from cuda_kernels.host.fingerprint import code_fingerprint, fingerprint, source_of_module
from cuda_kernels.kernel import Kernel, KernelError


def cubin(kernel: Kernel, arch: str) -> bytes:
    """Machine code of ``kernel`` for ``arch``: carried from elsewhere, or as :func:`built`.

    Raises:
        KernelError: as :func:`built`.
        ImportError: it has to be compiled, and a compiler is missing.
    """
    _check(kernel, arch)
    found = carried(source_key(kernel, "cubin", arch), f"{kernel.name} for sm_{arch}")
    return found if found is not None else built(kernel, arch)


def built(kernel: Kernel, arch: str) -> bytes:
    """Machine code of ``kernel`` for ``arch`` by the compilers here: from the cache, or compiled and put there.

    Raises:
        KernelError: it is not for ``arch``, or what the compilers made of it breaks what a launch relies on.
        ImportError: a compiler is missing.
    """
    _check(kernel, arch)
    return cached(cache_key(kernel, "cubin", arch), lambda: _compiled(kernel, arch))


def cache_key(kernel: Kernel, what: str, arch: str) -> str:
    """The cache key of this kernel's artifact of kind ``what``; it changes with the source and with the compilers."""
    return _hashed(f"{source_key(kernel, what, arch)} {code_fingerprint(kernel.function)} {compilers()}")


def source_key(kernel: Kernel, what: str, arch: str) -> str:
    """The part of the key that does not depend on the compilers."""
    bounds = (
        kernel.parameters,
        kernel.threads,
        kernel.min_blocks_on(arch),
        source_of_module("cuda_kernels.lowering.compiler"),
    )
    return _hashed(f"{what} {arch} {kernel.name} {bounds} {fingerprint(kernel.function)}")


def _check(kernel: Kernel, arch: str) -> None:
    if arch not in kernel.architectures:
        raise KernelError(f"{kernel.name} is for sm_{', sm_'.join(kernel.architectures)}, not for sm_{arch}")


def _compiled(kernel: Kernel, arch: str) -> bytes:
    from cuda_kernels.lowering import compiler

    code, report = compiler.link(compiler.ltoir(kernel, arch), arch, "cubin")
    # Where the annotations of tensor maps by value are lost, a kernel copies them to its stack, and the tensor memory
    # accelerator reads an address that is none.
    if "tensor_map" in kernel.parameter_kinds and " 0 bytes stack frame" not in report:
        raise KernelError(f"{kernel.name}, compiled for sm_{arch}, does not read its tensor maps in place: {report}")
    return code


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
