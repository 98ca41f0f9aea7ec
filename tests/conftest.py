"""Fixtures of all packages, how tests are shared out among workers, and how long they take."""

import asyncio
import atexit
import inspect
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.property_examples import load_profiles

DURATIONS = Path(__file__).parent / "assets" / "durations.txt"
RECORDED_FROM = 0.5
"""Tests that take fewer seconds are recorded together, under the name of their file."""

load_profiles()


def silence_errors() -> None:
    """Drop what is written to stderr from now on.

    Triton's native library reports every object that outlives the interpreter as a leak: pages of
    text after pytest's summary. Triton offers no switch and silences its own workers like this.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


atexit.register(silence_errors)  # registered before the libraries', so that it runs after theirs

# Behind `nohup`, or in the background of a script, these are ignored, which processes inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


# --- what goes to which worker


class WholeRunsTogether(LoadScopeScheduling):
    """Scheduler that gives one worker all tests of whole runs, which share their runs.

    Of the other tests each file goes to the worker that is free, the longest files first.
    """

    def _split_scope(self, nodeid: str) -> str:
        shares_runs = nodeid.startswith(("tests/deploy/runs/", "tests/deploy/offline/"))
        return "whole runs" if shares_runs else nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        recorded = read_durations()

        def seconds(scope: str) -> float:
            tests = self.workqueue[scope]
            files = {nodeid.split("::", 1)[0] for nodeid in tests}
            return sum(recorded.get(name, 0.0) for name in (*files, *tests))

        self.workqueue.move_to_end(max(self.workqueue, key=seconds), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return WholeRunsTogether(config, log) if config.getvalue("dist") == "loadscope" else None


# --- tests that are coroutines


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# --- tests that need a GPU


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where torch finds no GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no GPU on this machine")


# --- durations


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"update {DURATIONS.name} with the durations of the tests that run",
    )


def read_durations() -> dict[str, float]:
    """Return the recorded seconds of each long test, and of each file's short ones together."""
    lines = (line.split(maxsplit=1) for line in DURATIONS.read_text().splitlines() if line)
    return {name: float(seconds) for seconds, name in lines}


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    recorded = read_durations()
    tests = [item.nodeid for item in items]
    files = {nodeid.split("::", 1)[0] for nodeid in tests}
    minutes = sum(recorded.get(name, 0.0) for name in (*files, *tests)) / 60
    return [f"expected: {minutes:.0f} minutes, by {DURATIONS.name}"] if minutes >= 1 else []


class DurationRecorder:
    """Plugin that adds up setup, call and teardown of each test and writes them down."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        files = {name.split("::", 1)[0] for name in self.seconds}
        short: dict[str, float] = dict.fromkeys(files, 0.0)
        long: dict[str, float] = {}
        for name, taken in self.seconds.items():
            if taken >= RECORDED_FROM:
                long[name] = taken
            else:
                short[name.split("::", 1)[0]] += taken
        seconds = {**read_durations(), **short, **long}
        root = DURATIONS.parents[2]
        rows = sorted(seconds.items(), key=lambda row: (-row[1], row[0]))
        lines = [f"{taken:9.2f}  {name}" for name, taken in rows if is_test(root, name)]
        DURATIONS.write_text("".join(f"{line}\n" for line in lines))


def is_test(root: Path, name: str) -> bool:
    """Return True if a file of tests, or a test of one, still exists."""
    file, _, test = name.partition("::")
    if not (root / file).exists():
        return False
    function = test.partition("[")[0].rpartition("::")[2]
    return not test or f"def {function}(" in (root / file).read_text()


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


# --- fixtures


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Provide a Ray cluster in this process, shared by all tests that need one."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def whole_machine() -> Iterator[None]:
    """Restore the cores and the environment that an engine in this process has changed."""
    cores, environment = os.sched_getaffinity(0), dict(os.environ)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever an earlier test or pytest-xdist made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # None: not Python's
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system in memory of a size such as "2m"; without root the test is skipped."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode:
            pytest.skip("mounting a small disk needs root")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True, timeout=30)


@pytest.fixture(scope="session")
def build_model(tmp_path_factory):
    """Return a function that makes a folder of a tiny model: of few characters, two small layers.

    Its keywords are settings of `TinyModelConfig`, and `folder` and `seed`.
    """
    from learner.config.learner import TinyModelConfig
    from learner.model.policy import build_tiny

    small = {"hidden_size": 32, "layers": 2, "intermediate_size": 48, "heads": 2, "head_dim": 16}

    def build(*, characters="0123456789+=", folder=None, seed=3, **settings):
        folder = folder or tmp_path_factory.mktemp("tiny") / "model"
        config = TinyModelConfig(characters=characters, **{**small, **settings})
        build_tiny(config, folder, seed=seed)
        return str(folder)

    return build


@pytest.fixture(scope="session")
def model_path(build_model):
    """Return the folder of a model that knows sums of digits."""
    return build_model()


@pytest.fixture(scope="session")
def tiny_model(build_model):
    """Return a model folder with a token for each character of the lettered sums."""
    characters = "0123456789+-=,abcdefghijklmnopqr"
    sizes = {"head_dim": 32, "kv_heads": 1}
    return Path(build_model(characters=characters, context=256, **sizes, seed=0))
