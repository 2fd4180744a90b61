"""Names of modules and of the slots that an amax history keeps for them."""

from __future__ import annotations

from lightning_fp8.numerics.scaled import Role

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """A module's name without what torch.compile, activation checkpointing and FSDP wrap around modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def prefixes(name: str) -> list[str]:
    """The names of the parents of the module ``a.b.c``: ``a``, ``a.b``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def gemm_name(module_name: str, gemm: str) -> str:
    """The name of one GEMM of a module: ``layers.0.mlp.fc1``; the module's own where it has only one."""
    return f"{module_name}.{gemm}".strip(".")


def slot_name(module_name: str, role: Role) -> str:
    """The name of the slot of ``role`` in the module, or its GEMM, called ``module_name``: ``layers.0.fc1.input``."""
    return f"{module_name}.{role.value}" if module_name else role.value


def layer_of_slot(name: str) -> str:
    """The module's name, or its GEMM's, in a slot's: the inverse of :func:`slot_name`."""
    return name.rpartition(".")[0]
