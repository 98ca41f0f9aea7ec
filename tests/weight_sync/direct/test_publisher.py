"""Unstaged updates: the pause covers the transfer, and an engine whose transfer failed ends."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.publisher import DirectPublisher, Transfer
from weight_sync.errors import UpdateRefused

TENSORS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]


class Link:
    """An engine that records its calls (an `EngineLink`)."""

    def __init__(self, engine_id: str, events: list[str]) -> None:
        self.engine_id, self.workers, self._events = engine_id, 1, events
        self.attempt: str | None = None
        self.next = -1
        self.serves: int | None = None
        self.ended: str | None = None
        self.busy = False

    def record(self, event: str) -> None:
        self._events.append(f"{self.engine_id} {event}")

    def call(self, method: str, *arguments: Any) -> int | None:
        return getattr(self, method)(*arguments)

    def pause(self, version: int, attempt: str) -> int | None:
        if self.busy:
            raise UpdateRefused("in use")
        self.record(f"pause {version}")
        self.attempt, self.next = attempt, version
        return self.serves

    def transfer(self, attempt: str, method: str, payload: dict | None) -> None:
        assert attempt == self.attempt
        self.record(method)

    def resume(self, attempt: str) -> None:
        assert attempt == self.attempt
        self.record(f"resume {self.next}")
        self.attempt, self.serves = None, self.next

    def give_up(self, reason: str) -> None:
        self.attempt, self.ended = None, reason


class Sender:
    """Sends through the attempt's `transfer`; fails or hangs on demand."""

    def __init__(self, link: Link, faults: dict[str, Callable[[], None]]) -> None:
        self._link, self._faults = link, faults
        link.record("connect")

    def send(self, weights: list, transfer: Transfer) -> None:
        transfer(f"send {','.join(name for name, _ in weights)}", None)
        self._faults.get(self._link.engine_id, lambda: None)()
        transfer("end", None)

    def close(self) -> None:
        self._link.record("close")


def fail() -> None:
    raise ConnectionResetError("a cable")


class Parts:
    """A publisher with two engines, their events and reports, and faults by engine."""

    def __init__(self, sender: type[Sender] = Sender, timeout: float = 5.0) -> None:
        self.events: list[str] = []
        self.faults: dict[str, Callable[[], None]] = {}
        self.links = [Link("e0", self.events), Link("e1", self.events)]
        self.reports: list[WeightUpdateReport] = []
        self.publisher = DirectPublisher(
            lambda: self.links,
            lambda link, *_: sender(link, self.faults),
            self.reports.append,
            timeout=timeout,
            seed_seconds=1000.0,
        )

    def send(self, version: int) -> None:
        self.publisher.publish(version, TENSORS)
        self.publisher.flush(30)

    def seed(self) -> list[WeightUpdateReport]:
        """Seed, and return the new reports."""
        known = len(self.reports)
        self.publisher.on_idle()
        return self.reports[known:]


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.publisher.close()


def test_every_engine_stands_still_from_before_its_transfer_until_after_it(parts) -> None:
    parts.send(3)
    assert parts.events == [
        f"{engine} {event}"
        for engine in ("e0", "e1")
        for event in ("pause 3", "connect", "send a,b", "end", "resume 3")
    ]
    assert [(r.engine_id, r.version, r.error, r.bytes, r.seeding) for r in parts.reports] == [
        ("e0", 3, None, 28, True),
        ("e1", 3, None, 28, True),
    ]


def test_a_connection_is_kept_from_version_to_version(parts) -> None:
    parts.send(0)
    parts.events.clear()
    parts.send(1)
    assert parts.events[:4] == ["e0 pause 1", "e0 send a,b", "e0 end", "e0 resume 1"]
    assert not parts.reports[-1].seeding


def test_an_engine_whose_transfer_failed_is_ended_and_nothing_is_sent_to_it_again(parts) -> None:
    first, second = parts.links
    parts.send(0)
    parts.events.clear()
    parts.faults["e0"] = fail
    parts.send(1)
    assert (first.serves, first.ended) == (0, "ConnectionResetError: a cable")
    assert (second.serves, second.ended) == (1, None)
    assert parts.reports[-2].error == "ConnectionResetError: a cable"
    assert parts.reports[-2].swap_finished_at is None
    assert not parts.reports[-2].seeding
    assert parts.events[:3] == ["e0 pause 1", "e0 send a,b", "e0 close"]
    parts.faults.clear()
    parts.events.clear()
    assert parts.seed() == []
    parts.send(2)
    assert (parts.reports[-1].engine_id, len(parts.reports)) == ("e1", 5)
    assert not [event for event in parts.events if event.startswith("e0")]


def test_an_engine_that_hangs_is_left_behind_and_its_late_calls_are_not_sent() -> None:
    release, ended = threading.Event(), threading.Event()
    late: list[str] = []

    def hang() -> None:
        assert release.wait(30)
        late.append("woke")

    class Late(Sender):
        def send(self, weights: list, transfer: Transfer) -> None:
            try:
                super().send(weights, transfer)
            except UpdateRefused as error:
                late.append(str(error))
                ended.set()
                raise

    parts = Parts(Late, timeout=0.2)
    first, second = parts.links
    parts.faults["e0"] = hang
    parts.send(0)
    error = "DeadlineExceeded: e0 did not take version 0 within 0.2 s"
    assert (parts.reports[0].error, first.ended) == (error, error)
    assert (first.serves, second.serves) == (None, 0)
    release.set()
    assert ended.wait(30)
    assert late == ["woke", "e0 was given up"]
    assert "e0 end" not in parts.events
    assert "e0 resume 0" not in parts.events
    parts.publisher.close()


def test_an_engine_that_was_given_up_and_cannot_be_reached_delays_nobody(parts) -> None:
    first, second = parts.links

    def dead(reason: str) -> None:
        raise ConnectionError("gone")

    first.give_up, parts.faults["e0"] = dead, fail
    parts.send(0)
    assert [r.error for r in parts.reports] == ["ConnectionResetError: a cable", None]
    assert second.serves == 0


def test_an_engine_that_refuses_for_now_is_asked_again_and_not_reported(parts) -> None:
    first = parts.links[0]
    first.busy = True
    parts.send(0)
    assert [r.engine_id for r in parts.reports] == ["e1"]
    assert (parts.seed(), first.ended) == ([], None)
    first.busy = False
    assert [r.engine_id for r in parts.seed()] == ["e0"]
    assert first.serves == 0


def test_a_replaced_engine_is_connected_anew_and_one_that_left_is_forgotten(parts) -> None:
    parts.send(0)
    replacement = Link("e0", parts.events)
    parts.links[:] = [replacement]
    parts.events.clear()
    parts.send(1)
    assert sorted(parts.events[:2]) == ["e0 close", "e1 close"]
    assert parts.events[2:] == [
        *("e0 pause 1", "e0 connect", "e0 send a,b", "e0 end", "e0 resume 1")
    ]
    assert replacement.serves == 1


def test_seeding_reaches_only_engines_that_have_not_taken_the_newest_version(parts) -> None:
    assert parts.seed() == []
    parts.faults["e0"] = fail
    parts.send(3)
    parts.faults.clear()
    parts.links[0] = Link("e0", parts.events)
    parts.links.append(Link("e2", parts.events))
    parts.links[2].serves = 1  # served by the learner before it was restarted
    assert [(r.engine_id, r.version, r.error, r.seeding) for r in parts.seed()] == [
        ("e0", 3, None, True),
        ("e2", 3, None, False),
    ]
    assert [link.serves for link in parts.links] == [3, 3, 3]
    assert parts.seed() == []
    assert len({r.published_at for r in parts.reports}) == 1


@pytest.mark.vllm
def test_vllms_nccl_trainer_speaks_to_an_engine_in_its_own_terms(monkeypatch) -> None:
    """Everything of vLLM's but the communicator; the payloads are what its worker side reads."""
    from vllm.distributed.weight_transfer import nccl_engine

    from weight_sync.direct.vllm_sender import VllmSender

    calls: list[tuple[str, dict | None]] = []
    sent: list[str] = []

    def transfer(method: str, payload: dict | None) -> None:
        calls.append((method, payload))

    class Group:
        def destroy(self) -> None:
            sent.append("destroyed")

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: Group())
    monkeypatch.setattr(
        nccl_engine.NCCLTrainerWeightTransferEngine,
        "_broadcast",
        lambda self, source, meta: sent.extend(
            name for name, _ in self._checked_iter(source, meta)
        ),
    )
    sender = VllmSender("nccl", 1, TENSORS, transfer, "127.0.0.1", "cpu")
    assert [method for method, _ in calls] == ["init_weight_transfer_engine"]
    init = nccl_engine.NCCLWeightTransferInitInfo(**calls[0][1])
    assert (init.rank_offset, init.world_size, init.packed) == (1, 2, True)
    calls.clear()
    sender.send(TENSORS, transfer)
    assert [method for method, _ in calls] == [
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    update = nccl_engine.NCCLWeightTransferUpdateInfo(**calls[1][1]["update_info"])
    assert (update.names, update.dtype_names) == (["a", "b"], ["float32", "float32"])
    assert update.shapes == [[3], [2, 2]]
    sender.close()
    assert sent == ["a", "b", "destroyed"]


@pytest.mark.vllm
def test_vllms_ipc_trainer_speaks_so_too_and_stops_between_two_chunks(monkeypatch) -> None:
    """Everything of vLLM's but CUDA: memory is not exported, and each tensor is a chunk."""
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer import ipc_engine

    from weight_sync.direct.vllm_sender import VllmSender
    from weight_sync.vllm.transfer import tensor_shapes

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="gpu")
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def chunks(iterator, gpu_uuid, **_):
        for name, tensor in iterator:
            yield SimpleNamespace(
                names=[name], dtype_names=["float32"], shapes=[list(tensor.shape)],
                ipc_handle={gpu_uuid: ()}, tensor_sizes=[tensor.nbytes],
            )  # fmt: skip

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks)
    calls: list[tuple[str, dict | None]] = []

    def transfer(method: str, payload: dict | None) -> None:
        calls.append((method, payload))

    sender = VllmSender("ipc", 1, TENSORS, transfer, "127.0.0.1", "cpu")
    assert calls == [("init_weight_transfer_engine", {"packed": True})]
    calls.clear()
    sender.send(TENSORS, transfer)
    assert [method for method, _ in calls] == [
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
    ]
    assert [tensor_shapes(payload) for _, payload in calls[1:3]] == [{"a": (3,)}, {"b": (2, 2)}]
    calls.clear()

    def given_up(method: str, payload: dict | None) -> None:
        transfer(method, payload)
        if method == "update_weights":
            sender.close()

    with pytest.raises(UpdateRefused, match="the connection was given up"):
        sender.send(TENSORS, given_up)
    assert [method for method, _ in calls] == ["start_weight_update", "update_weights"]
