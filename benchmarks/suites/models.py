"""Suite ``models``: training steps of Llamas on a GPU, in BF16 and in FP8: eager, with Liger, compiled, captured.

Models are Hugging Face's, with random weights in BF16: two and four blocks of Llama-8B, and all of Llama-1B. Tokens
pass forward, backward, AdamW and the update of scales. Each group of contenders is timed in turns, then freed. The
first step's loss is compared with that of BF16. A result's ``details`` are tokens per second, GiB at the peak of a step
above what was there before the model, the host's milliseconds until the step's last launch returns, and the kernels
that take longest, in milliseconds of a step.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from lightning_fp8 import FP8FabricPrecision

SECONDS = 0.4
"""Measuring time per contender."""
BF16 = "BF16"
NEAR = 0.02
"""Largest relative difference between the first losses."""
KERNELS = 12
"""Kernels that ``details`` names."""
EAGER_STEPS = 4
"""Before a step is captured: scales exist, and caches are full."""


@dataclass(frozen=True)
class Run:
    """A contender: a recipe (None is BF16), and how it runs.

    ``liger``: RoPE and cross entropy of Liger-Kernel; in BF16 also its norms and MLPs.
    """

    recipe: str | None = None
    fuse: bool = True
    liger: bool = False
    attention: bool = False
    compiled: bool = False
    captured: bool = False

    @property
    def by(self) -> str:
        recipe = f"{OURS}, {self.recipe}" if self.recipe else BF16
        more = " with FP8 attention" * self.attention + ", fuse=False" * (not self.fuse) + ", Liger" * self.liger
        return recipe + more + ", compiled" * self.compiled + ", captured" * self.captured


@dataclass(frozen=True)
class Llama:
    """A model and a batch. ``first_last`` keeps its first and last block in BF16, as by default."""

    name: str
    config: dict[str, int]
    batch: tuple[int, int]
    groups: tuple[tuple[Run, ...], ...]
    first_last: bool = False


def _config(
    width: int, inner: int, heads: int, groups: int, blocks: int, vocabulary: int, tied: bool = False
) -> dict[str, int]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
        "num_hidden_layers": blocks, "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip


LIGERS = Run(liger=True), Run("delayed", liger=True), Run("delayed", liger=True, attention=True)
TWO_BLOCKS = (
    (Run(), Run("delayed"), Run("delayed", fuse=False), Run("tensorwise"), Run("blockwise"), *LIGERS),
    (Run(compiled=True), Run("delayed", compiled=True), Run("tensorwise", compiled=True)),
    (Run(captured=True), Run("delayed", captured=True)),
)
WHOLE = ((Run(), Run("delayed"), *LIGERS[:2]), (Run(compiled=True), Run("delayed", compiled=True)))
SMALL = ((Run(), Run("delayed"), Run(captured=True), Run("delayed", captured=True)), WHOLE[1])
FULL = (
    Llama("training step of a Llama", _config(4096, 14336, 32, 8, 2, 8192), (4, 2048), TWO_BLOCKS),
    Llama(
        "training step of four blocks of Llama-8B, vocabulary 128,256",
        _config(4096, 14336, 32, 8, 4, 128_256), (4, 2048), WHOLE[:1], first_last=True,
    ),
    Llama("training step of Llama-1B", _config(2048, 8192, 32, 8, 16, 128_256, True), (1, 2048), SMALL, True),
    Llama("training step of Llama-1B", _config(2048, 8192, 32, 8, 16, 128_256, True), (4, 2048), WHOLE[:1], True),
)  # fmt: skip
TINY = (Llama("training step of a Llama", _config(64, 96, 2, 1, 2, 256), (2, 16), TWO_BLOCKS),)


def unavailable(plan: Plan) -> str | None:
    if find_spec("transformers") is None:
        return "needs transformers"
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no tables of layers
    for llama in TINY if plan.dry else FULL:
        for group in llama.groups:
            plan.say(f"models: {llama.name}, {llama.batch[0]} × {llama.batch[1]} tokens: {group[0].by} and others")
            yield from timed(plan, list(_candidates(llama, group, plan)), (group[0].by,), SECONDS)
            gc.collect()
            if plan.device.type == "cuda":
                torch._dynamo.reset()
                torch.cuda.empty_cache()


def _candidates(llama: Llama, group: Sequence[Run], plan: Plan) -> Iterator[Candidate]:
    right = None
    for each in group:
        result = Result(llama.name, each.by, llama.batch, "bfloat16")
        plan.say(f"models: {each.by}")
        if reason := _why_not(each, plan):
            yield Candidate(replace(result, note=reason), None)
            continue
        try:
            before = _allocated(plan)
            with Liger(each) as patched:
                step = training_step(llama, each, plan)
                loss = float(step())
                right = loss if right is None else right
                details = _details(step, llama, plan, before)
        except Exception as error:
            yield Candidate(replace(result, correct=False, note=said(error)), None)
            continue
        result = replace(result, correct=abs(loss / right - 1) <= NEAR, details=details)
        yield Candidate(result, Contender(step, prepare=patched.install))


def _why_not(run: Run, plan: Plan) -> str | None:
    if plan.device.type != "cuda" and (run.liger or run.captured):
        return "needs a CUDA device"
    return "needs liger-kernel" if run.liger and find_spec("liger_kernel") is None else None


# --- Liger-Kernel -----------------------------------------------------------------------------------------------------


class Liger:
    """What Liger-Kernel replaces in transformers and torch for a run, or what was there before it.

    Its functions are found by name when a model runs, so :meth:`install` comes before each step of a contender.
    """

    def __init__(self, run: Run) -> None:
        from transformers.models.llama import modeling_llama

        self._places: list[tuple[Any, str]] = [
            (modeling_llama, "apply_rotary_pos_emb"), (modeling_llama, "LlamaRMSNorm"), (modeling_llama, "LlamaMLP"),
            (modeling_llama.LlamaForCausalLM, "forward"), (F, "cross_entropy"),
        ]  # fmt: skip
        plain = self._now()
        if run.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            whole = run.recipe is None
            apply_liger_kernel_to_llama(
                rope=True, cross_entropy=True, fused_linear_cross_entropy=False, rms_norm=whole, swiglu=whole
            )
        self._replaced = self._now()
        self._plain = plain

    def _now(self) -> list[Any]:
        return [getattr(owner, name) for owner, name in self._places]

    def install(self) -> None:
        for (owner, name), value in zip(self._places, self._replaced):
            setattr(owner, name, value)

    def __enter__(self) -> Liger:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), value in zip(self._places, self._plain):
            setattr(owner, name, value)


# --- A step -----------------------------------------------------------------------------------------------------------


def training_step(llama: Llama, run: Run, plan: Plan) -> Callable[[], Tensor]:
    """A function that runs one step and returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama.config, max_position_embeddings=llama.batch[1])
    torch.manual_seed(0)
    with plan.device:  # drawing on the CPU would take seconds
        model = LlamaForCausalLM(config).bfloat16()
    plugin = None
    if run.recipe is not None:
        recipe: Any = run.recipe
        plugin = FP8FabricPrecision(
            recipe=recipe, attention=run.attention, fuse=run.fuse, first_last_layers_bf16=llama.first_last
        )
        plugin.convert_module(model)
    on_card = plan.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=on_card, capturable=on_card and run.captured)
    tokens = torch.randint(0, config.vocab_size, llama.batch, device=plan.device)
    forward = torch.compile(model) if run.compiled else model

    def step() -> Tensor:
        with nullcontext() if plugin is None else plugin.forward_context():
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()  # also updates delayed scales
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return _captured(step) if run.captured else step


def _captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph. Its first call returns the loss of the first eager step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
        losses = [step() for _ in range(EAGER_STEPS)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    waiting = losses[:1]

    def replay() -> Tensor:
        if waiting:
            return waiting.pop()
        graph.replay()
        return loss

    return replay


# --- What it costs besides --------------------------------------------------------------------------------------------


def _allocated(plan: Plan) -> int:
    if plan.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _details(step: Callable[[], Tensor], llama: Llama, plan: Plan, before: int) -> dict[str, Any]:
    """See the module; on the CPU only the tokens of a step."""
    step()
    details: dict[str, Any] = {"tokens": llama.batch[0] * llama.batch[1]}
    if plan.device.type != "cuda":
        return details
    torch.cuda.reset_peak_memory_stats()
    host, whole = [], []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    details["tokens per second"] = round(details["tokens"] / statistics.median(whole))
    details["host ms"] = round(1e3 * statistics.median(host), 2)
    details["peak GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    for event in profile.events():  # type: ignore[union-attr]
        kernels[event.name[:90]] += event.device_time_total
    details["kernels, ms"] = {name: round(us / 1e3, 3) for name, us in kernels.most_common(KERNELS)}
    return details
