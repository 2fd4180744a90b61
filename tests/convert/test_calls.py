"""What a module's source says of a child whose weight it reads: it is never called, or that is open."""

from __future__ import annotations

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8.convert.calls import reads_weight_only


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class CallsSuper(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.fc.weight.square().mean()
        return super().forward(x)


def run(module: Layer, x: Tensor) -> Tensor:
    return module.fc(x)


class PassesItself(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.fc.weight.norm()
        return run(self, x)


class CallsAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.fc.weight.std()
        for child in self.children():
            x = child(x)
        return x


class CallsByName(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self._helper(x) + self.fc.weight.sum()

    def _helper(self, x: Tensor) -> Tensor:
        return dict(self.named_children())["fc"](x)


class CallsItInTheStep(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x) @ F.normalize(self.fc.weight).T

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.fc(batch).sum()


class ReadsItInTheStep(CallsItInTheStep):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).sum()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("cls", [CallsSuper, PassesItself, CallsAll, CallsByName, CallsItInTheStep])
def test_what_may_call_it_where_its_name_does_not_stand_is_open(cls: type[nn.Module]) -> None:
    assert not reads_weight_only(cls(), "fc")


def test_a_call_of_the_module_itself_and_lightnings_own_methods_leave_nothing_open() -> None:
    assert reads_weight_only(ReadsItInTheStep(), "fc")
