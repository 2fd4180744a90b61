"""Captures CUDA graphs in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures ``run`` in a CUDA graph, after one call to warm up.

    Returns:
        The graph, and the results of the captured call, which each replay overwrites.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
