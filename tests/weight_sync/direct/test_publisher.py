"""Unstaged updates: the pause covers the transfer, and an engine whose transfer failed ends."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.attempt import Connect, Transfer
from weight_sync.direct.publisher import DirectPublisher
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
        transfer(f"send {','.join(name for name, _ in weights)}", [None])
        self._faults.get(self._link.engine_id, lambda: None)()
        transfer("end", [None])

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
        self.open(lambda links, *_: sender(*links, self.faults), timeout)

    def open(self, connect: Connect, timeout: float) -> None:
        self.publisher = DirectPublisher(
            lambda: self.links, connect, self.reports.append, timeout=timeout, seed_seconds=1000.0
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

    parts = Parts(Late, timeout=1.0)
    first, second = parts.links
    parts.faults["e0"] = hang
    parts.send(0)
    error = (
        "DeadlineExceeded: version 0 was not taken within 1 s of the last progress: an engine "
        "answered; no answer from the sender"
    )
    assert (parts.reports[0].error, first.ended) == (error, error)
    assert (first.serves, second.serves) == (None, 0)
    release.set()
    assert ended.wait(30)
    assert late == ["woke", "this attempt was given up"]
    assert "e0 end" not in parts.events
    assert "e0 resume 0" not in parts.events
    parts.publisher.close()


def test_a_connection_that_opens_after_the_deadline_is_closed_once_and_not_sent_by() -> None:
    release, closed = threading.Event(), threading.Event()

    class Slow(Sender):
        def __init__(self, link: Link, faults: dict[str, Callable[[], None]]) -> None:
            super().__init__(link, faults)
            assert link.engine_id == "e1" or release.wait(30)

        def send(self, weights: list, transfer: Transfer) -> None:
            self._link.record("send")
            super().send(weights, transfer)

        def close(self) -> None:
            super().close()
            if self._link.engine_id == "e0":
                closed.set()

    parts = Parts(Slow, timeout=1.0)
    parts.send(0)
    assert [link.serves for link in parts.links] == [None, 0]
    release.set()
    assert closed.wait(30)
    parts.publisher.close()
    assert [event for event in parts.events if event.startswith("e0")] == [
        "e0 pause 0",
        "e0 connect",
        "e0 close",
    ]


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


class TogetherSender:
    """Sends to a group; records its engines, and fails or hangs between start and end."""

    def __init__(self, links: list[Link], events: list[str], between: Callable[[], None]) -> None:
        self.links, self._events, self._between = links, events, between
        events.append(f"connect {self}")

    def __str__(self) -> str:
        return "+".join(link.engine_id for link in self.links)

    def send(self, weights: list, transfer: Transfer) -> None:
        transfer("start", [None] * len(self.links))
        for _ in weights:
            self._between()
        transfer("end", [None] * len(self.links))

    def close(self) -> None:
        self._events.append(f"close {self}")


class Together(Parts):
    """A publisher that sends to its three engines at once."""

    def __init__(self, timeout: float = 5.0) -> None:
        super().__init__()
        self.connections: list[str] = []
        self.between: Callable[[], None] = lambda: None
        self.links.append(Link("e2", self.events))
        self.open(
            lambda links, *_: TogetherSender(list(links), self.connections, lambda: self.between()),
            timeout,
        )
        self.publisher.together = True

    def outcomes(self) -> dict[str, str | None]:
        """Return the errors of the newest report of each engine."""
        return {report.engine_id: report.error for report in self.reports}


@pytest.fixture
def together() -> Iterator[Together]:
    parts = Together()
    yield parts
    parts.publisher.close()


def test_engines_together_share_one_connection_as_long_as_they_are_the_same(together) -> None:
    together.send(0)
    together.send(1)
    assert together.connections == ["connect e0+e1+e2"]
    assert [link.serves for link in together.links] == [1, 1, 1]
    pauses = [event for event in together.events[-12:] if "pause" in event]
    assert sorted(pauses) == ["e0 pause 1", "e1 pause 1", "e2 pause 1"]
    together.links[1] = Link("e3", together.events)
    together.seed()
    assert together.connections[1:] == ["close e0+e1+e2", "connect e3"]
    together.send(2)
    assert together.connections[3:] == ["connect e0+e3+e2", "close e3"]
    together.links[2].busy = True
    together.send(3)
    assert together.connections[5:] == ["connect e0+e3", "close e0+e3+e2"]
    together.send(4)
    together.links[2].busy = False
    together.seed()
    assert together.connections[7:] == ["connect e2"]
    assert [link.serves for link in together.links] == [4, 4, 4]


def test_an_engine_that_cannot_pause_is_left_out_of_the_group(together) -> None:
    first, second, third = together.links

    def dead(version: int, attempt: str) -> None:
        raise ConnectionError("gone")

    first.pause, second.busy = dead, True
    together.send(0)
    assert together.connections == ["connect e2"]
    assert together.outcomes() == {"e0": "ConnectionError: gone", "e2": None}
    assert (second.ended, third.serves) == (None, 0)


def test_an_engine_that_fails_in_the_middle_ends_all_of_its_group_and_is_named(together) -> None:
    gone = threading.Event()
    together.send(0)
    second = together.links[1]

    def die(attempt: str, method: str, payload: dict | None) -> None:
        raise ConnectionError("killed")

    def between() -> None:  # a broadcast whose peer is gone hangs until it is aborted
        second.transfer = die
        assert gone.wait(30)

    together.between = between
    second.transfer = die
    together.send(1)
    gone.set()
    shared = "LoadFailed: e1 failed while they took version 1 together: ConnectionError: killed"
    assert together.outcomes() == {"e0": shared, "e1": "ConnectionError: killed", "e2": shared}
    assert [link.ended for link in together.links] == [shared, "ConnectionError: killed", shared]
    assert together.connections[-1] == "close e0+e1+e2"
    assert together.seed() == []
    together.links[:] = [Link(f"e{number}", together.events) for number in range(3)]
    together.between = lambda: None
    together.seed()
    assert [link.serves for link in together.links] == [1, 1, 1]


def test_a_broadcast_that_moves_slowly_is_left_alone_and_one_that_stalls_is_named() -> None:
    together, go_on = Together(timeout=2.0), threading.Event()
    together.between = lambda: time.sleep(1.1)  # longer than the deadline, in all
    together.send(0)
    assert together.outcomes() == {"e0": None, "e1": None, "e2": None}
    together.between = lambda: go_on.wait(30)
    together.send(1)
    go_on.set()
    for error in together.outcomes().values():
        assert error == (
            "DeadlineExceeded: version 1 was not taken within 2 s of the last progress: 0 of 2 "
            "tensors are sent; no answer from the sender"
        )
    together.publisher.close()


def test_only_the_engine_that_does_not_answer_to_a_pause_is_given_up() -> None:
    together, go_on = Together(timeout=1.0), threading.Event()
    together.links[2].pause = lambda version, attempt: go_on.wait(30)
    together.send(0)
    go_on.set()
    outcomes = together.outcomes()
    assert (outcomes["e0"], outcomes["e1"]) == (None, None)
    assert outcomes["e2"].endswith("no answer from e2")
    assert [link.serves for link in together.links] == [0, 0, None]
    together.publisher.close()


@pytest.mark.vllm
def test_vllms_nccl_trainer_speaks_to_an_engine_in_its_own_terms(monkeypatch) -> None:
    """Everything of vLLM's but the communicator; the payloads are what its worker side reads."""
    from vllm.distributed.weight_transfer import nccl_engine

    from weight_sync.direct.vllm_sender import VllmSender

    calls: list[tuple[str, dict | None]] = []
    sent: list[str] = []

    def transfer(method: str, payloads: list[dict | None]) -> None:
        calls.extend((method, payload) for payload in payloads)

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
    sender = VllmSender("nccl", [1], TENSORS, transfer, "127.0.0.1", "cpu")
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
@pytest.mark.parametrize("tensor", [torch.ones(2, 2), torch.nn.Parameter(torch.ones(3))])
def test_a_tensor_on_its_way_to_the_device_is_not_waited_for(monkeypatch, tensor) -> None:
    """The next ones are copied while the device sends those before."""
    from weight_sync.direct.vllm_sender import VersionSource

    calls, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a, **k: calls.append((a, k)) or to(self, *a, **k)
    )
    ((name, sent),) = VersionSource([("a", tensor)], "cpu")
    assert (name, calls) == ("a", [(("cpu",), {"non_blocking": True})])
    assert torch.equal(sent, tensor)
    assert not sent.requires_grad


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

    def transfer(method: str, payloads: list[dict | None]) -> None:
        calls.extend((method, payload) for payload in payloads)

    sender = VllmSender("ipc", [1], TENSORS, transfer, "127.0.0.1", "cpu")
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

    def given_up(method: str, payloads: list[dict | None]) -> None:
        transfer(method, payloads)
        if method == "update_weights":
            sender.close()

    with pytest.raises(UpdateRefused, match="the connection was given up"):
        sender.send(TENSORS, given_up)
    assert [method for method, _ in calls] == ["start_weight_update", "update_weights"]
