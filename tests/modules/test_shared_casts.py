"""Layers that read one tensor share its cast; the reference is the same block whose layers each read a copy of it."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import FP8FabricPrecision, Linear, convert_module, fp8_autocast
from lightning_fp8.delayed.update import reduce_and_update
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.modules.state import fp8_state_dict, load_fp8_state_dict
from lightning_fp8.numerics.formats import float8_of
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Role
from tests.convert.zoo import DECODER, VOCABULARY, hf
from tests.tiers import thorough

Between = Callable[[Tensor, int], Any]


class Casts(TorchDispatchMode):
    """Counts casts by the elements' format and the shape of what is cast, and notes their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.results: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.name().startswith("lightning_fp8::quantize"):
            self.counts[float8_of(args[1]).name.lower(), tuple(args[0].shape)] += 1
            self.results.append(weakref.ref(result[0]))
        return result


class Block(nn.Module):
    """q, k and v read one tensor, or each a copy of it."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, features) for features in (48, 24, 24))
        self.o = nn.Linear(48, 20)
        self.copies = copies
        self.between: Between = lambda h, reader: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        read = []
        for index, layer in enumerate((self.q, self.k, self.v)):
            self.between(h, index)
            read.append(layer(h.clone() if self.copies else h))
        q, k, v = read
        return self.o(q * torch.cat([k, v], -1).sigmoid())


def twins(dtype: torch.dtype = torch.bfloat16) -> tuple[Block, Block]:
    """A converted block, and the same with copies."""
    block = Block().to(dtype)
    other = copy.deepcopy(block)
    other.copies = True
    for each in (block, other):
        convert_module(each, first_last_layers_bf16=False)
    return block, other


def trained(block: Block, steps: int, recipe: Any = "delayed", run: Any = None, **options: Any) -> list[Tensor]:
    """Everything that steps of two micro-batches give, from outputs and gradients to the FP8 state."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    given: list[Tensor] = []
    for step in range(steps):
        for _ in range(2):
            x = (step + torch.randn(3, 9, 32, generator=generator)).to(block.norm.weight.dtype).requires_grad_()
            with fp8_autocast(fp8_recipe=recipe), torch.autocast("cpu", **options):
                y = run(block, x) if run else block(x)
            y.float().square().sum().backward()
            given += [y, x.grad]
        given += [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    state = fp8_state_dict(block)
    return [each.detach().clone() for each in (*given, state["scale"], state["amax_history"], state["seen"])]


def assert_alike(block: Block, other: Block, steps: int = 3, **options: Any) -> None:
    for one, two in zip(trained(block, steps, **options), trained(other, steps, **options), strict=True):
        assert torch.equal(one, two)


def checkpointed(use_reentrant: bool) -> Any:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_casts_change_no_bit(recipe: str) -> None:
    block, other = twins()
    assert_alike(block, other, recipe=recipe, enabled=False)
    with Casts() as shared:
        trained(block, 1, recipe, enabled=False)
    with Casts() as apart:
        trained(other, 1, recipe, enabled=False)
    x = ("e4m3", (27, 32))
    assert (shared.counts.pop(x), apart.counts.pop(x)) == (2 * 1, 2 * 3)  # in two micro-batches
    assert shared.counts == apart.counts


@pytest.mark.parametrize(
    "options",
    [
        {"run": checkpointed(True), "enabled": False},
        {"run": checkpointed(False), "enabled": False, "recipe": "rowwise"},
        {"enabled": True, "dtype": torch.bfloat16},
    ],
    ids=["reentrant", "checkpoint", "autocast"],
)
def test_surroundings_change_no_bit(options: dict[str, Any]) -> None:
    block, other = twins(torch.float32)
    assert_alike(block, other, **options)
    with Casts() as casts:
        trained(block, 1, **options)
    assert casts.counts["e4m3", (27, 32)] == (4 if "run" in options else 2)  # forwards


def changed(h: Tensor, reader: int) -> None:
    """Between two readers, in place."""
    with torch.no_grad():
        h += reader


def stored_elsewhere(block: Block) -> None:
    block.between = changed


def other_data(block: Block) -> None:
    """Between two readers, which moves no version."""

    def exchange(h: Tensor, reader: int) -> None:
        h.data = h.detach() + reader

    block.between = exchange


def one_in_eval_mode(block: Block) -> None:
    block.k.eval()


def first_in_eval_mode(block: Block) -> None:
    block.q.eval()


def first_frozen(block: Block) -> None:
    block.q.requires_grad_(False)


def last_frozen(block: Block) -> None:
    block.v.requires_grad_(False)


def other_rows(block: Block) -> None:
    """A file whose rows for readers of one tensor differ."""
    state = fp8_state_dict(block)
    generator = torch.Generator().manual_seed(2)
    for key in ("scale", "seen"):
        state[key] = torch.rand(state[key].shape, generator=generator)
    load_fp8_state_dict(block, state)


def scales_updated_within(block: Block) -> None:
    """Between k and v, as by an optimizer that steps inside the forward pass."""
    history = block.k.history
    block.between = lambda h, reader: reduce_and_update({history: history.recipe}) if reader == 2 else None


def another_recipe_inside(block: Block) -> None:
    forward = block.k.forward
    block.k.forward = fp8_autocast(fp8_recipe="mxfp8")(forward)


@pytest.mark.parametrize(
    "hostile",
    [
        stored_elsewhere,
        other_data,
        one_in_eval_mode,
        first_in_eval_mode,
        first_frozen,
        last_frozen,
        scales_updated_within,
        another_recipe_inside,
    ],
    ids=lambda hostile: hostile.__name__,
)
def test_what_differs_is_not_shared(hostile: Callable[[Block], None]) -> None:
    block, other = twins()
    for each in (block, other):
        trained(each, 1, enabled=False)
        hostile(each)
    assert_alike(block, other, steps=2, enabled=False)


def rows_of_readers(block: Block, key: str) -> list[float]:
    state = fp8_state_dict(block)
    return [state[key][state["names"].index(f"{reader}.input")].item() for reader in "qkv"]


@pytest.mark.parametrize(
    "run", [None, checkpointed(False), checkpointed(True)], ids=["plain", "checkpoint", "reentrant"]
)
def test_readers_of_unequal_rows_take_the_first_ones_scale(run: Any) -> None:
    """As after a file in which they differ: q's scale casts for all, and all rows get the largest amax."""
    block, other = twins()
    for each in (block, other):
        other_rows(each)
    (scale, *others), amaxes = rows_of_readers(block, "scale"), rows_of_readers(block, "seen")
    state = fp8_state_dict(other)
    for reader in "qkv":
        state["scale"][state["names"].index(f"{reader}.input")] = scale
    load_fp8_state_dict(other, state)  # with copies, this is what sharing has to give
    assert scale not in others
    x = torch.randn(3, 9, 32).bfloat16()
    given = []
    for each in (block, other):
        into = x.clone().requires_grad_()
        with fp8_autocast(), Casts() as casts:
            y = run(each, into) if run else each(into)
        assert casts.counts["e4m3", (27, 32)] == (3 if each.copies else 1)
        y.float().square().sum().backward()
        given.append([y, into.grad, *(parameter.grad for parameter in each.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*given, strict=True))
    largest = block.norm(x).abs().max().item()
    first = max(amaxes[0], largest)
    assert rows_of_readers(block, "seen") == [max(first, amax) for amax in amaxes]
    assert rows_of_readers(other, "seen") == [max(largest, amax) for amax in amaxes]


def test_a_layer_that_reads_more_passes_its_amax_on() -> None:
    block, _ = twins()
    block.between = lambda h, reader: block.q(torch.full((2, 32), 300.0).bfloat16()) if reader == 0 else None
    with fp8_autocast():
        block(torch.randn(4, 32).bfloat16())
    assert rows_of_readers(block, "seen") == [300.0] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoints_boundary_lies_between_readers(use_reentrant: bool) -> None:
    """The recomputation of k casts alone, and gives what its forward gave."""
    block, other = twins()
    for each in (block, other):
        other_rows(each)
    x = torch.randn(27, 32).bfloat16().requires_grad_()
    gradients = []
    for inside in (False, True):
        block.zero_grad()
        with fp8_autocast():
            h = block.norm(x)
            q = block.q(h if inside else h.clone())
            k = checkpoint(block.k, h, use_reentrant=use_reentrant) if inside else block.k(h)
        (q.float().square().sum() + k.float().square().sum()).backward()
        gradients.append([parameter.grad for parameter in (*block.q.parameters(), *block.k.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_evaluation_shares_and_holds_nothing(recipe: str) -> None:
    block, other = twins()
    for each in (block, other):
        trained(each, 1, recipe, enabled=False)
    x = torch.randn(8, 32).bfloat16()
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe), Casts() as casts:
        h = block.norm(x)
        block.q(h), block.k(h)
        assert casts.counts["e4m3", (8, 32)] == 1
        last = block.v(h)
        assert casts.counts["e4m3", (8, 32)] == 1
        assert all(result() is None for result in casts.results)  # h is there, and its copy is not: nobody reads it
        assert torch.equal(last, other.v(h))
    with torch.inference_mode(), fp8_autocast(fp8_recipe=recipe):
        assert torch.equal(block(x), other(x))


def test_no_copy_outlives_its_input_or_its_region() -> None:
    layers = [Linear(32, 32) for _ in range(3)]
    with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"), Casts() as casts:
        x = torch.randn(8, 32)
        layers[0](x)
        kept = casts.results[0]
        assert kept() is not None  # another may read it
        del x
        assert kept() is None
        x = torch.randn(8, 32)
        layers[1](x)
        kept = casts.results[2]
        assert kept() is not None
    assert kept() is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_llama_keeps_and_casts_what_it_needs(recipe: str) -> None:
    """In BF16 backward keeps an input for q, k and v, one for gate and up, and those of o and down. In FP8 they take
    half of that, and scales no more than a byte for 32, which MXFP8's take, and float32 ones of 128 rows.
    """
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": 64}
    model = hf("LlamaForCausalLM", "LlamaConfig", **DECODER | sizes)()
    plugin = FP8FabricPrecision(recipe, first_last_layers_bf16=False, cache_fp8_weights=True, fuse=False)
    plugin.convert_module(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tokens = torch.randint(0, VOCABULARY, (2, 64))
    kept: dict[tuple[int, int], int] = {}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        of_codes = bool(saved) and saved[-1].dtype == torch.float8_e4m3fn  # whose scales are saved next
        if of_codes or tensor.dtype == torch.float8_e4m3fn:
            kept[tensor.untyped_storage()._cdata, tensor.storage_offset()] = tensor.nbytes
        saved.append(tensor)
        return tensor

    with Casts() as casts:
        for micro_batch in range(2):
            kept.clear()
            saved.clear()
            with saved_tensors_hooks(note, lambda tensor: tensor), plugin.forward_context():
                loss = model(input_ids=tokens, labels=tokens).loss
            inputs_in_bf16 = 4 * 128 * (3 * 128 + 352) * 2
            assert len(kept) == 4 * 4 * 2, "codes and scales"
            assert inputs_in_bf16 / 2 < sum(kept.values()) <= (1 + 1 / 32) * inputs_in_bf16 / 2, micro_batch
            loss.backward()
    optimizer.step()
    found: Counter[tuple[int, ...]] = Counter()
    for (_, shape), count in casts.counts.items():
        found[shape] += count
    assert found == {
        (128, 128): 4 * (2 * 3 + 2 + 2 * 3),  # inputs, weights and gradients
        (128, 352): 4 * (2 * 1 + 1 + 2 * 2),
        (128, 64): 4 * 2 * 2,  # gradients of k and v
        (64, 128): 4 * 2,  # weights
        (352, 128): 4 * 2,
    }
    assert recipe != "delayed" or sum(n for (float8, _), n in casts.counts.items() if float8 == "e5m2") == 2 * 4 * 7


@thorough
def test_compiled_code_shares_casts_without_state() -> None:
    """What ``torch.compile`` traces holds each layer's cast; AOTAutograd's partitioner leaves one of equal ones."""
    block, _ = twins()
    casts: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        casts.append(sum("quantize" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x = torch.randn(27, 32).bfloat16()
    with fp8_autocast(fp8_recipe="rowwise"):
        y = compiled(x)
        assert torch.equal(y, block(x))
    assert casts == [2 + 4]  # of h for q, k and v, of o's input, and of the weights


def test_data_at_the_address_of_freed_data_is_not_taken_for_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert_module(model, first_last_layers_bf16=False)
    first, second = (layer.slots[Role.INPUT] for layer in model)
    x, recipe = torch.randn(4, 8), make_recipe("tensorwise")
    for _ in range(100):
        cast = input_cast(x, x.dtype, recipe, first, observe=False)
        for _ in range(2):  # the second may get the storage that the first has left
            x.data = torch.randn(4, 8)
        assert input_cast(x, x.dtype, recipe, second, observe=False) is not cast
