"""An optimizer's step updates the scales of the models of which it holds a parameter, and no others."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, Optimizer

from lightning_fp8 import DelayedScaling, FP8Precision, Linear, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.numerics.scaled import Role
from tests.small import Regression, quiet_trainer, regression_data

LARGER = 1000.0
E4M3_MAX = 448.0
WINDOW = 64


class Adapted(nn.Module):
    """A frozen layer and the parameter that is trained in its place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.adapter
        return y


class LoRA(nn.Module):
    """A frozen layer with a low-rank adapter, as of peft."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return y


def converted(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    convert_module(model, first_last_layers_bf16=False)
    return model


def backward(model: nn.Module, factor: float = 1.0) -> float:
    """A forward and a backward of random inputs; their largest magnitude."""
    x = torch.randn(8, 16) * factor
    with fp8_autocast(fp8_recipe="delayed"):
        loss = model(x).square().mean()
    loss.backward()
    return float(x.abs().max())


def train(model: nn.Module, optimizer: Optimizer, steps: int, factor: float = 1.0) -> float:
    """Train on random inputs; the largest magnitude of the last one."""
    largest = 0.0
    for _ in range(steps):
        largest = backward(model, factor)
        optimizer.step()
        optimizer.zero_grad()
    return largest


def input_scale(layer: Any) -> float:
    return float(layer.slots[Role.INPUT].scale)


def scale_for(largest: float) -> float:
    return float(torch.tensor(E4M3_MAX) / largest)


def test_two_models_with_two_optimizers_train_as_if_alone() -> None:
    def made(of: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(of)
        model = convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), first_last_layers_bf16=False)
        return model, Adam(model.parameters(), 1e-2)

    def step(of: int, model: nn.Module, optimizer: Optimizer, number: int) -> None:
        torch.manual_seed(100 * of + number)
        train(model, optimizer, 1, 1.0 + number)

    together = [made(of) for of in range(2)]
    for number in range(4):
        step(0, *together[0], number)
        if number % 2:
            step(1, *together[1], number)
    for of, (model, _) in enumerate(together):
        alone = made(of)
        for number in range(of, 4, 1 + of):
            step(of, *alone, number)
        one, two = ({**each.state_dict(), **fp8_state_dict(each)} for each in (model, alone[0]))
        assert all(torch.equal(one[key], two[key]) for key in one if isinstance(one[key], Tensor))
        assert one["updates"] == two["updates"] == (4, 2)[of]


def test_the_optimizer_of_another_model_updates_nothing() -> None:
    model, other = converted(nn.Linear(16, 16)), converted(nn.Linear(16, 16))
    teacher = converted(nn.Linear(16, 16)).requires_grad_(False)
    optimizer = SGD(other.parameters(), 1e-9)
    for each in (model, other):
        backward(each)
    with fp8_autocast():
        teacher(torch.randn(8, 16))
    optimizer.step()
    assert [each[0].history.updates for each in (model, other, teacher)] == [0, 1, 0]
    assert input_scale(model[0]) == input_scale(teacher[0]) == 0 < input_scale(other[0])


@pytest.mark.parametrize("frozen", ["backbone", "base of LoRA", "base of an adapter"])
def test_frozen_layers_follow_the_optimizer_of_what_is_trained(frozen: str) -> None:
    if frozen == "backbone":
        model = converted(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))
        layer = model[0]
    elif frozen == "base of LoRA":
        model = converted(LoRA(nn.Linear(16, 16)), LoRA(nn.Linear(16, 16)))
        layer = model[0].base_layer
    else:
        model = converted(Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, 16)))
        layer = model[0].layer
    weight = layer.weight.detach().clone()
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], 1e-9)
    for factor in (1.0, LARGER):
        largest = train(model, optimizer, 1, factor)
        assert input_scale(layer) == scale_for(largest)
    assert float(layer.slots[Role.WEIGHT].scale) == scale_for(float(weight.abs().max()))
    assert torch.equal(layer.weight, weight)


def test_accumulation_is_one_update_with_the_largest_of_all_micro_batches() -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = SGD(model.parameters(), 1e-9)
    largest = max(backward(model, factor) for factor in (1.0, LARGER, 10.0))
    optimizer.step()
    assert model[0].history.updates == 1
    assert input_scale(model[0]) == scale_for(largest)


def test_an_optimizer_made_before_the_conversion() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = SGD(model.parameters(), 1e-9)
    convert_module(model, first_last_layers_bf16=False)
    largest = train(model, optimizer, 1)
    assert input_scale(model[0]) == scale_for(largest)


def test_a_backbone_that_is_frozen_in_a_second_phase_follows_the_second_optimizer() -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    first = SGD(model.parameters(), 1e-9)  # lives on, as that of an earlier Trainer
    train(model, first, 3)
    model[0].requires_grad_(False)
    second = SGD(model[1].parameters(), 1e-9)
    largest = train(model, second, 1, LARGER)
    assert input_scale(model[0]) == scale_for(largest)


@pytest.mark.parametrize("change", ["assigned", "replaced", "adapted"])
def test_scales_follow_a_new_optimizer_of_new_parameters(change: str) -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    train(model, SGD(model.parameters(), 1e-9), 3)
    if change == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    elif change == "replaced":
        for layer in list(model):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            layer.bias = nn.Parameter(layer.bias.detach().clone())
    else:
        model[0] = Adapted(model[0])
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], 1e-9)
    largest = train(model, optimizer, 1, LARGER)  # the largest of the window, too
    assert input_scale(model[0].layer if change == "adapted" else model[0]) == scale_for(largest)


def test_an_optimizer_in_the_closure_of_another_one_updates_its_own_model() -> None:
    models = converted(nn.Linear(16, 16)), converted(nn.Linear(16, 16))
    outer, inner = (SGD(model.parameters(), 1e-9) for model in models)

    def closure() -> float:
        train(models[1], inner, 2)
        return backward(models[0])

    outer.step(closure)
    histories = [model[0].history for model in models]
    assert all(isinstance(history, AmaxHistory) for history in histories)
    assert [history.updates for history in histories] == [1, 2]


def test_a_sharded_model_keeps_its_optimizer_when_another_one_is_made(one_rank: DeviceMesh) -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    for module in (*model, model):
        fully_shard(module, mesh=one_rank)
    optimizer = SGD(model.parameters(), 1e-9)
    train(model, optimizer, 3)
    other = Linear(8, 8)  # has a history of its own
    history = model[0].history
    history.scale.fill_(1.0)
    train(model, optimizer, 1)
    assert bool((history.scale != 1).all())
    assert other.history is not history


@pytest.mark.parametrize("of", ["unpickled", "part of a copy", "part of a model", "not converted"])
def test_a_frozen_layer_whose_model_is_not_known_follows_every_optimizer(of: str) -> None:
    model = converted(Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, 16)))
    train(model, SGD([each for each in model.parameters() if each.requires_grad], 1e-9), 3)
    if of == "unpickled":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        model = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    elif of == "part of a copy":
        model = nn.Sequential(copy.deepcopy(model[0]))
    elif of == "part of a model":
        model = nn.Sequential(model[0])
    else:
        model = nn.Sequential(Adapted(Linear(16, 16)))
    gc.collect()
    largest = train(model, SGD([each for each in model.parameters() if each.requires_grad], 1e-9), 1, LARGER)
    assert input_scale(model[0].layer) == scale_for(largest)


class GAN(Regression):
    """Two networks with an optimizer each in one module, trained by hand in the order of DCGAN.

    The discriminator's step comes between the forward and the backward of the generator. With ``growth``, inputs grow
    by that factor in each batch, and so do amaxes.
    """

    def __init__(self, growth: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.growth = growth
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.noise: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return [Adam(each.parameters(), 1e-3) for each in (self.net, self.critic)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generates, criticizes = self.optimizers()
        self.noise.append(batch[0] * self.growth ** len(self.noise))
        fake = self.net(self.noise[-1])
        criticizes.zero_grad()
        scores = self.critic(torch.cat([torch.tanh(batch[0]), fake.detach()])).float().mean(1)
        self.manual_backward(F.softplus(torch.cat([-scores[: len(fake)], scores[len(fake) :]])).mean())
        criticizes.step()
        generates.zero_grad()
        loss = F.softplus(-self.critic(fake).float().mean(1)).mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        generates.step()


def gan_trainer(**options: Any) -> Any:
    plugin = FP8Precision(DelayedScaling(amax_history_len=WINDOW), first_last_layers_bf16=False)
    return quiet_trainer(plugins=[plugin], **options)


def test_the_scales_of_a_gan_move_with_both_networks() -> None:
    model, trainer = GAN(growth=1.2), gan_trainer()
    trainer.fit(model, regression_data())
    state = trainer.precision_plugin.histories["model"].state_dict()
    scale = dict(zip(state["names"], state["scale"].tolist()))
    largest = max(float(each.abs().max()) for each in model.noise)
    assert scale["net.0.input"] == scale_for(largest)
    weights = {name: float(each.detach().abs().max()) for name, each in model.named_parameters()}
    for name in ("net.0", "net.2", "critic.0", "critic.2"):
        assert 0 < scale[f"{name}.grad_output"] < torch.inf
        assert scale[f"{name}.weight"] == pytest.approx(scale_for(weights[f"{name}.weight"]), rel=0.02)
    assert not state["seen"].any()


def test_a_gan_trains_as_it_does_in_high_precision() -> None:
    """Also where a network's scales change between its forward and its backward."""
    model, reference = GAN(growth=1.2), GAN(growth=1.2)
    gan_trainer(max_epochs=4).fit(model, regression_data())
    quiet_trainer(max_epochs=4).fit(reference, regression_data())
    torch.testing.assert_close(torch.tensor(model.losses), torch.tensor(reference.losses), rtol=0.05, atol=0.02)
    changes = [
        torch.cat([(p - b).flatten() for p, b in zip(each.parameters(), GAN().parameters())])
        for each in (
            model,
            reference,
        )
    ]
    assert float(F.cosine_similarity(*changes, dim=0)) > 0.97


def test_a_gan_resumes_to_the_bit(tmp_path: Path) -> None:
    straight, half, resumed = GAN(), GAN(), GAN()
    trainers = [gan_trainer(max_epochs=epochs) for epochs in (4, 2, 4)]
    trainers[0].fit(straight, regression_data())
    trainers[1].fit(half, regression_data())
    trainers[1].save_checkpoint(tmp_path / "half.ckpt")
    trainers[2].fit(resumed, regression_data(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert straight.losses[-8:] == resumed.losses
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
    states = [trainers[index].precision_plugin.histories["model"].state_dict() for index in (0, 2)]
    for key in ("scale", "amax_history", "seen", "counts"):
        assert torch.equal(states[0][key], states[1][key]), key
    assert states[0]["updates"] == states[1]["updates"] == 32
