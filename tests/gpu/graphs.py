"""CUDA graphs of what tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of ``run``, which ran once before, and its results, which each replay overwrites."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
