"""vLLM's own nccl engines take versions together, and survive kills in the middle of a broadcast.

Publisher, sender, receivers and both of vLLM's transfer engines are the real ones, each engine's
worker in a process of its own; `nccl_rehearsal` says what stands in for NCCL.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from nccl_rehearsal import BUFFER_BYTES, SHAPES, GlooCommunicator, replace_cuda, serve

from tests.weight_sync.conftest import ReceiverLink
from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.direct_receiver import DirectReceiver
from weight_sync.direct.publisher import DirectPublisher
from weight_sync.errors import LoadFailed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]


class AsyncLLM:
    """The endpoint of an engine whose worker is another process."""

    def __init__(self, context: Any) -> None:
        self.connection, other = context.Pipe()
        self.worker = context.Process(target=serve, args=(other,), daemon=True)
        self.worker.start()
        other.close()

    async def rpc(self, method: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.ask, method, **arguments)

    def ask(self, method: str, **arguments: Any) -> Any:
        try:
            self.connection.send((method, arguments))
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise LoadFailed("a process of the vLLM engine is gone") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.rpc("init_weight_transfer_engine", init_info=request.init_info)

    async def update_weights(self, request: Any) -> None:
        await self.rpc("update_weights", update_info=request.update_info)

    def __getattr__(self, method: str) -> Any:
        return partial(self.rpc, method)


class Engine:
    """An engine (a `DirectEngine`), its receiver, and its link to the learner."""

    def __init__(self, number: int, context: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint, self.version = AsyncLLM(context), None
        expected = {name: (None, shape) for name, shape in SHAPES.items()}
        self.receiver = DirectReceiver(self, self.join, expected=expected, timeout=60.0)
        self.link = ReceiverLink(f"e{number}", self.receiver, loop)
        self.running = asyncio.run_coroutine_threadsafe(self.receiver.run(asyncio.Event()), loop)

    async def join(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        from weight_sync.vllm.transfer import transfer

        try:
            await transfer(self.endpoint, method, payload)
        except Exception as error:  # as `VllmEngine` does
            raise LoadFailed(f"vLLM could not load {method}: {error}") from error

    async def serve(self, version: int) -> None:
        self.version = version

    def kill(self) -> None:
        self.endpoint.worker.kill()
        self.endpoint.worker.join(30)
        assert self.endpoint.worker.exitcode == -signal.SIGKILL

    def weights(self) -> dict[str, tuple[int, np.ndarray]]:
        """Return address and content of every weight that the worker serves."""
        return self.endpoint.ask("weights")

    def close(self) -> None:
        self.running.cancel()
        self.endpoint.worker.kill()
        self.endpoint.worker.join(30)
        self.endpoint.connection.close()


def version_of(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def serves(engine: Engine, version: int) -> bool:
    """Return True if the worker's weights are those of a version, and it says so."""
    weights = engine.weights()
    same = [np.array_equal(weights[name][1], t.numpy()) for name, t in version_of(version)]
    return engine.version == version and all(same)


class Run:
    """A learner that publishes, and the engines that are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: Any) -> None:
        from weight_sync.direct import vllm_sender

        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["vllm.v1.worker.gpu_worker"])
        self.loop, self.engines, self.created = loop, [], 0
        self.reports: list[WeightUpdateReport] = []
        self.broadcasts = 0
        self.groups: list[int] = []
        self.open = 0
        self.at_broadcast: Callable[[int], None] = lambda number: None
        run = self

        class Counting(GlooCommunicator):
            def __init__(self, group: Any) -> None:
                super().__init__(group)
                run.groups.append(group.world_size)
                run.open += 1

            def destroy(self) -> None:
                super().destroy()
                run.open -= 1

            def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
                run.broadcasts += 1
                run.at_broadcast(run.broadcasts)
                super().broadcast(tensor, src)

        replace_cuda(monkeypatch.setattr, Counting)
        monkeypatch.setattr(vllm_sender, "BUFFER_BYTES", BUFFER_BYTES)

        def connect(links: Any, weights: Any, transfer: Any) -> Any:
            workers = [link.workers for link in links]
            address = "127.0.0.1"
            return vllm_sender.VllmSender("nccl", workers, weights, transfer, address, "cpu")

        self.publisher = DirectPublisher(
            lambda: [engine.link for engine in self.engines],
            connect,
            self.reports.append,
            timeout=60.0,
            seed_seconds=1000.0,
        )
        self.publisher.together = True

    def add(self, count: int) -> None:
        for _ in range(count):
            self.engines.append(Engine(self.created, self.context, self.loop))
            self.created += 1

    def publish(self, version: int) -> None:
        self.broadcasts = 0
        self.publisher.publish(version, version_of(version))
        self.publisher.flush(120)

    def replace_ended(self) -> None:
        """Make the engines again that ended, as their supervisors do."""
        ended = [engine for engine in self.engines if engine.running.done()]
        for engine in ended:
            self.engines.remove(engine)
            engine.close()
        self.add(len(ended))
        self.publisher.on_idle()


@pytest.fixture
def run(monkeypatch, loop) -> Iterator[Run]:
    run = Run(monkeypatch, loop)
    yield run
    run.publisher.close()
    for engine in run.engines:
        engine.close()


def test_engines_take_versions_by_one_broadcast_and_no_weight_moves(run) -> None:
    run.add(3)
    run.publish(0)
    assert all(serves(engine, 0) for engine in run.engines)
    addresses = [{n: w[0] for n, w in engine.weights().items()} for engine in run.engines]
    needed = run.broadcasts
    assert needed == 3
    run.publish(1)
    assert all(serves(engine, 1) for engine in run.engines)
    assert (run.groups, run.broadcasts) == ([4], needed)
    assert addresses == [{n: w[0] for n, w in engine.weights().items()} for engine in run.engines]
    run.add(1)
    run.publisher.on_idle()
    assert serves(run.engines[-1], 1)
    run.publish(2)
    assert all(serves(engine, 2) for engine in run.engines)
    assert (run.groups, run.open) == ([4, 2, 5], 1)
    assert {report.error for report in run.reports} == {None}


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_an_engine_killed_in_a_broadcast_ends_its_group_and_new_ones_get_the_version(
    run, at: str
) -> None:
    run.add(3)
    run.publish(0)
    number = {"first": 1, "middle": 2, "last": run.broadcasts}[at]
    victim = run.engines[1]

    def kill(broadcast: int) -> None:
        if broadcast == number and victim.endpoint.worker.is_alive():
            victim.kill()

    run.at_broadcast = kill
    run.publish(1)
    newest = {report.engine_id: report.error for report in run.reports}
    assert all(newest.values()), newest
    first_seen = ("the vLLM engine is gone", "Connection closed by peer")  # by it or by the sender
    assert any(cause in error for cause in first_seen for error in newest.values())
    for engine in run.engines:  # none of them goes on with a mixture
        with suppress(LoadFailed):
            engine.running.result(60)
            pytest.fail("it should have ended")
        assert engine.version == 0
    run.at_broadcast = lambda broadcast: None
    run.replace_ended()
    assert len(run.engines) == 3
    assert all(serves(engine, 1) for engine in run.engines)
    run.publish(2)
    assert all(serves(engine, 2) for engine in run.engines)
