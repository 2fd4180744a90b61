from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, one core each

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import tiers
from tests.distributed import launch

if TYPE_CHECKING:
    from tests.cuda_kernels.emulated import Emulator


# --- Two tiers --------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers of tests")
    group.addoption("--thorough", action="store_true", help="run every test; by default each thing is tested once")
    group.addoption("--left-out", action="store_true", help="run what the default run leaves out, and nothing else")
    group.addoption(
        "--part", type=tiers.part_and_parts, metavar="I/N", help="with --left-out: every Nth file, from file I on"
    )
    group.addoption(
        "--budget",
        action="store_true",
        help=f"fail where a test takes over {tiers.SECONDS_OF_A_TEST} s of processor time, or all of them over"
        f" {tiers.SECONDS_OF_THE_RUN} s",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in tiers.MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(Run(config), "run of tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("late_rows"):
        name, rows = mark.args
        metafunc.parametrize(name, rows(), ids=lambda value: value.name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the thorough run takes, unless that is asked for; what ``file.py::test`` names stays."""
    if config.getoption("part") and not config.getoption("left_out"):
        raise pytest.UsageError("--part is of --left-out; pass both, or neither")
    found = config.stash[tiers.COLLECTED] = tiers.collected(items)
    if config.getoption("left_out"):
        kept = {*tiers.part(found.left_out(), *(config.getoption("part") or (0, 1)), lambda item: item.path)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
        return
    if config.getoption("thorough") or config.getoption("markexpr").strip() == "thorough":
        return
    kept = {*found.default, *tiers.named(items, config.args, config.invocation_params.dir)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What is imported and collected stays: Python's collector does not look for garbage there."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


class Run:
    """Counts what the run leaves out, and its processor time; under pytest-xdist, in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = 0
        self.seconds = 0.0
        self.slow: list[tuple[float, str]] = []
        """Tests over their limit."""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += sum(item not in self.config.stash[tiers.COLLECTED].default for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = tiers.processor_seconds()
        result = yield
        seconds = tiers.processor_seconds() - before
        if seconds > tiers.SECONDS_OF_A_TEST:
            self.slow.append((seconds, item.nodeid))
        return result  # type: ignore[return-value]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        launch.end()
        self.seconds = tiers.processor_seconds()  # of workers, too, which are children
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["run of tests"] = self.left_out, self.slow
        elif self.config.getoption("budget") and self.over_budget() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended; each collects the same."""
        self.left_out, slow = getattr(node, "workeroutput", {}).get("run of tests", (self.left_out, []))
        self.slow += map(tuple, slow)

    def over_budget(self) -> bool:
        return bool(self.slow) or self.seconds > tiers.SECONDS_OF_THE_RUN

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.write_line(f"{self.left_out} tests are left to pytest --thorough")
        if self.config.getoption("budget"):
            terminalreporter.section("budget", red=self.over_budget(), green=not self.over_budget())
            terminalreporter.write_line(f"{self.seconds:.0f} s of processor time; {tiers.SECONDS_OF_THE_RUN} s allowed")
            for seconds, name in sorted(self.slow, reverse=True):
                terminalreporter.write_line(f"{seconds:.0f} s; {tiers.SECONDS_OF_A_TEST} s allowed: {name}")


# --- Fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """No test depends on what others drew, were warned of, or left of torch.distributed."""
    from lightning_fp8.attention.modules.arguments import said

    torch.manual_seed(0)
    said.clear()
    before = set(os.environ)
    yield
    for name in {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"} - before:
        os.environ.pop(name, None)  # Lightning's strategies leave them, and accelerate would start a process group
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("This test leaves a process group behind; the fixture one_rank ends its own")


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """The emulator that runs kernels with CPU tensors, as PTX on the CPU."""
    from tests.cuda_kernels.emulated import Emulator, executing

    emulator = Emulator()
    with executing(emulator):
        yield emulator
