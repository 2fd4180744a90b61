"""Towers of blocks: the layers that a model counts, and where in them each linear layer lies.

Which of them stay in BF16 is the policy of :mod:`lightning_fp8.convert.policy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_fp8.convert.layers.linears import features_of, is_linear, linear_names
from lightning_fp8.names import clean_name


@dataclass(frozen=True)
class BlockPosition:
    """The position of a linear layer: in layer ``index`` of ``count``; ``tower`` is named where there are several."""

    index: int
    count: int
    tower: str = ""

    def __str__(self) -> str:
        return f"in layer {self.index} of {self.count}{f' of {self.tower}' if self.tower else ''}"


@dataclass(frozen=True)
class Tower:
    """The names of blocks in their order, their common ``prefix`` with its dot, and whether they are bare layers."""

    prefix: str
    blocks: tuple[str, ...]
    bare: bool = False

    def index_of(self, name: str) -> int | None:
        """The index of the block that is or holds the module ``name``; None outside the tower."""
        return next((i for i, block in enumerate(self.blocks) if f"{name}.".startswith(f"{block}.")), None)


def find_positions(model: nn.Module) -> dict[str, BlockPosition]:
    """The place of each linear layer that lies in a tower.

    A tower is a ``ModuleList`` or ``Sequential`` of same-class blocks (of few classes, in hybrids), or of stages that
    each have a list of them: a model's encoder and its decoder are two towers. Where there is none, layers are linear
    layers in registration order: of each child that holds three or more of them, if there are several such children,
    else of the whole model.
    """
    linears = linear_names(model)
    if towers := find_towers(model):
        places = {
            name: BlockPosition(index, len(tower.blocks), tower.prefix.rstrip(".") if len(towers) > 1 else "")
            for name in linears
            for tower in towers
            if (index := tower.index_of(name)) is not None
        }
        return places
    networks = _networks(model)
    members = [[name for name in linears if name.startswith(f"{network}.")] for network in networks]
    if len(networks) < 2:
        networks, members = [""], [linears]
    return {
        name: BlockPosition(index, len(names), network)
        for network, names in zip(networks, members)
        for index, name in enumerate(names)
    }


def find_blocks(model: nn.Module) -> dict[str, BlockPosition]:
    """The place of each block of the towers that :func:`find_positions` speaks of; empty where there are none."""
    towers = [tower for tower in find_towers(model) if not tower.bare]
    return {
        block: BlockPosition(index, len(tower.blocks), tower.prefix.rstrip(".") if len(towers) > 1 else "")
        for tower in towers
        for index, block in enumerate(tower.blocks)
    }


def prefixes_of_parts(towers: list[Tower]) -> set[str]:
    """Prefixes of the parts, beside each other, that towers lie in: encoder and decoder, or teacher and student."""
    paths = [tower.prefix.split(".")[:-1] for tower in towers]
    shared = next((depth for depth, names in enumerate(zip(*paths)) if len(set(names)) > 1), min(map(len, paths)))
    return {f"{'.'.join(path[: shared + 1])}." for path in paths if len(path) > shared}


def find_towers(model: nn.Module) -> list[Tower]:
    """All lists of blocks; where there are none, of each network the longest list of bare linear layers in a chain."""
    towers = list(_block_lists(model, ""))
    if blocks := [tower for tower in towers if not tower.bare]:
        return blocks
    sizes = {clean_name(name): features_of(module) for name, module in model.named_modules() if is_linear(module)}
    chains = [tower for tower in towers if _is_chain([sizes[name] for name in tower.blocks])]
    networks: dict[str, Tower] = {}
    for part in (chains and prefixes_of_parts(chains)) or {""}:
        inside = [tower for tower in chains if tower.prefix.startswith(part)]
        networks |= {part: max(inside, key=lambda tower: len(tower.blocks))} if inside else {}
    return [tower for tower in chains if tower in networks.values()]


def _is_chain(sizes: list[tuple[int, int]]) -> bool:
    """Whether each layer takes what the one before gives; heads beside each other do not."""
    return all(before[0] == after[1] for before, after in zip(sizes, sizes[1:]))


def _block_lists(module: nn.Module, prefix: str) -> Iterator[Tower]:
    """The outermost lists of two or more blocks that hold linear layers, each class of them twice or more.

    Lists inside a block (experts, sub-blocks) are no candidates: their length says nothing about the depth.
    """
    children = dict(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        classes = {type(child) for child in children.values()}
        bare = {is_linear(child) for child in children.values()}
        # Hybrids have blocks of two classes by turns; parts of one block are of a class each.
        alike = 2 * len(classes) <= len(children) and len(bare) == 1
        if alike and all(linear_names(child) for child in children.values()):
            names = [clean_name(f"{prefix}{child_name}") for child_name in children]
            stages = [list(_blocks_of_stage(child)) for child in children.values()]
            if all(stages):
                names = [f"{name}.{block}" for name, stage in zip(names, stages) for block in stage]
            yield Tower(prefix, tuple(names), bare == {True})
            return
    for child_name, child in children.items():
        yield from _block_lists(child, clean_name(f"{prefix}{child_name}."))


def _blocks_of_stage(module: nn.Module) -> Iterator[str]:
    """The names, in a stage of a Swin or a ConvNeXt, of its blocks."""
    for child_name, child in module.named_children():
        if child_name in ("blocks", "layers") and isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (f"{child_name}.{index}" for index, block in child.named_children() if linear_names(block))


def _networks(model: nn.Module) -> list[str]:
    """Names of the children that hold three or more linear layers, of the first module with several children."""
    prefix = ""
    module = model
    while True:
        children = {child_name: child for child_name, child in module.named_children() if linear_names(child)}
        if len(children) != 1:
            break
        child_name, module = next(iter(children.items()))
        prefix = f"{prefix}{child_name}."
    return [
        clean_name(f"{prefix}{child_name}") for child_name, child in children.items() if len(linear_names(child)) > 2
    ]
