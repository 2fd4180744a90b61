"""Translations of PTX instructions, by family. Importing a family registers its instructions."""

from tests.ptx_on_cpu.instructions import (
    arithmetic,
    bits,
    control,
    conversion,
    copies,
    matrices,
    mbarriers,
    memory,
    synchronization,
    warps,
)

__all__ = [
    "arithmetic",
    "bits",
    "control",
    "conversion",
    "copies",
    "matrices",
    "mbarriers",
    "memory",
    "synchronization",
    "warps",
]
