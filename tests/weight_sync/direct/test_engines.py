"""Unstaged updates: the pause covers the transfer, and an engine whose transfer failed ends."""

import threading
from collections.abc import Callable

import pytest
import torch

from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.engines import DirectEngines, Transfer
from weight_sync.errors import NotNow, VersionOrderError

TENSORS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]


class Link:
    """An engine that writes down what is asked of it (an `EngineLink`)."""

    def __init__(self, engine_id: str, events: list[str]) -> None:
        self.engine_id, self.workers, self._events = engine_id, 1, events
        self.attempt: str | None = None
        self.next = -1
        self.serves: int | None = None
        self.ended: str | None = None
        self.busy = False

    def say(self, event: str) -> None:
        self._events.append(f"{self.engine_id} {event}")

    def pause(self, version: int, attempt: str) -> int | None:
        if self.busy:
            raise NotNow("in use")
        self.say(f"pause {version}")
        self.attempt, self.next = attempt, version
        return self.serves

    def transfer(self, attempt: str, method: str, payload: dict | None) -> None:
        assert attempt == self.attempt
        self.say(method)

    def resume(self, attempt: str) -> None:
        assert attempt == self.attempt
        self.say(f"resume {self.next}")
        self.attempt, self.serves = None, self.next

    def give_up(self, why: str) -> None:
        self.attempt, self.ended = None, why


class Sender:
    """Sends through the attempt's `transfer`; fails or hangs on demand."""

    def __init__(self, link: Link, faults: dict[str, Callable[[], None]]) -> None:
        self._link, self._faults = link, faults
        link.say("connect")

    def send(self, weights: list, transfer: Transfer) -> None:
        transfer(f"send {','.join(name for name, _ in weights)}", None)
        self._faults.get(self._link.engine_id, lambda: None)()
        transfer("end", None)

    def close(self) -> None:
        self._link.say("close")


def fail() -> None:
    raise ConnectionResetError("a cable")


@pytest.fixture
def make():
    """What sends to two engines, its events, the engines, and faults by engine."""
    events: list[str] = []
    faults: dict[str, Callable[[], None]] = {}
    links = [Link("e0", events), Link("e1", events)]
    reports: list[WeightUpdateReport] = []
    publisher = DirectEngines(
        lambda: links, lambda link, *_: Sender(link, faults), reports.append, timeout=5
    )
    yield publisher, events, links, faults, reports
    publisher.close()


def test_every_engine_stands_still_from_before_its_transfer_until_after_it(make) -> None:
    publisher, events, _, _, reports = make
    assert publisher.send(3, TENSORS) == reports
    assert events == [
        f"{engine} {event}"
        for engine in ("e0", "e1")
        for event in ("pause 3", "connect", "send a,b", "end", "resume 3")
    ]
    assert [(r.engine_id, r.version, r.error, r.bytes, r.seeding) for r in reports] == [
        ("e0", 3, None, 28, True),
        ("e1", 3, None, 28, True),
    ]


def test_a_connection_is_kept_from_version_to_version(make) -> None:
    publisher, events, _, _, reports = make
    publisher.send(0, TENSORS)
    events.clear()
    publisher.send(1, TENSORS)
    assert events[:4] == ["e0 pause 1", "e0 send a,b", "e0 end", "e0 resume 1"]
    assert not reports[-1].seeding


def test_an_engine_whose_transfer_failed_is_told_and_nothing_is_sent_to_it_again(make) -> None:
    publisher, events, (first, second), faults, reports = make
    publisher.send(0, TENSORS)
    events.clear()
    faults["e0"] = fail
    publisher.send(1, TENSORS)
    assert (first.serves, first.ended) == (0, "ConnectionResetError: a cable")
    assert (second.serves, second.ended) == (1, None)
    assert reports[-2].error == "ConnectionResetError: a cable"
    assert reports[-2].swap_finished_at is None
    assert not reports[-2].seeding
    assert events[:3] == ["e0 pause 1", "e0 send a,b", "e0 close"]
    faults.clear()
    events.clear()
    assert publisher.seed(TENSORS) == []
    assert [r.engine_id for r in publisher.send(2, TENSORS)] == ["e1"]
    assert not [event for event in events if event.startswith("e0")]


def test_an_engine_that_hangs_is_left_behind_and_what_comes_late_is_not_sent(make) -> None:
    publisher, events, (first, second), faults, reports = make
    publisher._timeout = 0.2
    release, ended = threading.Event(), threading.Event()
    late: list[str] = []

    def hang() -> None:
        assert release.wait(30)
        late.append("woke")

    class Late(Sender):
        def send(self, weights: list, transfer: Transfer) -> None:
            try:
                super().send(weights, transfer)
            except NotNow as error:
                late.append(str(error))
                ended.set()
                raise

    publisher._connect = lambda link, *_: Late(link, faults)
    faults["e0"] = hang
    publisher.send(0, TENSORS)
    error = "DeadlineExceeded: e0 did not take version 0 within 0.2 s"
    assert (reports[0].error, first.ended) == (error, error)
    assert (first.serves, second.serves) == (None, 0)
    release.set()
    assert ended.wait(30)
    assert late == ["woke", "e0 was given up"]
    assert "e0 end" not in events
    assert "e0 resume 0" not in events


def test_an_engine_that_was_given_up_and_cannot_be_told_holds_nobody_up(make) -> None:
    publisher, _, (first, second), faults, reports = make

    def dead(attempt: str, why: str) -> None:
        raise ConnectionError("gone")

    first.give_up, faults["e0"] = dead, fail
    publisher.send(0, TENSORS)
    assert [r.error for r in reports] == ["ConnectionResetError: a cable", None]
    assert second.serves == 0


def test_an_engine_that_takes_nothing_now_is_asked_again_and_not_reported(make) -> None:
    publisher, _, (first, _), _, reports = make
    first.busy = True
    publisher.send(0, TENSORS)
    assert [r.engine_id for r in reports] == ["e1"]
    assert (publisher.seed(TENSORS), first.ended) == ([], None)
    first.busy = False
    assert [r.engine_id for r in publisher.seed(TENSORS)] == ["e0"]
    assert first.serves == 0


def test_an_engine_made_again_is_connected_anew_and_one_that_left_is_forgotten(make) -> None:
    publisher, events, links, _, _ = make
    publisher.send(0, TENSORS)
    again = Link("e0", events)
    links[:] = [again]
    events.clear()
    publisher.send(1, TENSORS)
    assert sorted(events[:2]) == ["e0 close", "e1 close"]
    assert events[2:] == ["e0 pause 1", "e0 connect", "e0 send a,b", "e0 end", "e0 resume 1"]
    assert again.serves == 1


def test_seeding_reaches_those_alone_that_have_not_taken_the_newest_version(make) -> None:
    publisher, events, links, faults, reports = make
    assert publisher.seed(TENSORS) == []
    faults["e0"] = fail
    publisher.send(3, TENSORS)
    faults.clear()
    links[0] = Link("e0", events)
    links.append(Link("e2", events))
    links[2].serves = 1  # a learner that was made again finds it so
    assert [(r.engine_id, r.version, r.error, r.seeding) for r in publisher.seed(TENSORS)] == [
        ("e0", 3, None, True),
        ("e2", 3, None, False),
    ]
    assert [link.serves for link in links] == [3, 3, 3]
    assert publisher.seed(TENSORS) == []
    assert len({r.published_at for r in reports}) == 1


def test_versions_only_grow(make) -> None:
    publisher, *_ = make
    publisher.send(4, TENSORS)
    with pytest.raises(VersionOrderError, match="version 4 cannot follow version 4"):
        publisher.send(4, TENSORS)


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
    from weight_sync.vllm.transfer import announced

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
    assert [announced(payload) for _, payload in calls[1:3]] == [{"a": (3,)}, {"b": (2, 2)}]
    calls.clear()

    def given_up(method: str, payload: dict | None) -> None:
        transfer(method, payload)
        if method == "update_weights":
            sender.close()

    with pytest.raises(NotNow, match="the connection was given up"):
        sender.send(TENSORS, given_up)
    assert [method for method, _ in calls] == ["start_weight_update", "update_weights"]
