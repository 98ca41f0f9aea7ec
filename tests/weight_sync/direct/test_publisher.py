"""Unstaged updates: the pause covers the transfer, and an engine whose transfer failed ends."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.attempt import Transfer
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
    """Sends to a group through the attempt's `transfer`; fails or hangs on demand."""

    def __init__(
        self, links: list[Link], events: list[str], faults: dict[str, Callable[[], object]]
    ) -> None:
        self.name = "+".join(link.engine_id for link in links)
        self._links, self._events, self._faults = links, events, faults
        self.record("connect")

    def record(self, event: str) -> None:
        self._events.append(f"{self.name} {event}")

    def send(self, weights: list, transfer: Transfer) -> None:
        transfer(f"send {','.join(name for name, _ in weights)}", [None] * len(self._links))
        for _ in weights:
            self._faults.get(self._links[0].engine_id, lambda: None)()
        transfer("end", [None] * len(self._links))

    def close(self) -> None:
        self.record("close")


def fail() -> None:
    raise ConnectionResetError("a cable")


class Parts:
    """A publisher, its engines, their events and reports, and faults by the first of a group."""

    def __init__(
        self, sender: type[Sender] = Sender, *, engines: int = 2, timeout: float = 5.0
    ) -> None:
        self.events: list[str] = []
        self.faults: dict[str, Callable[[], object]] = {}
        self.links = [Link(f"e{number}", self.events) for number in range(engines)]
        self.reports: list[WeightUpdateReport] = []
        self.publisher = DirectPublisher(
            lambda: self.links,
            lambda links, *_: sender(list(links), self.events, self.faults),
            self.reports.append,
            timeout=timeout,
            seed_seconds=1000.0,
        )
        self.publisher.together = engines == 3

    def send(self, version: int) -> None:
        self.publisher.publish(version, TENSORS)
        self.publisher.flush(30)

    def seed(self) -> list[WeightUpdateReport]:
        """Seed, and return the new reports."""
        known = len(self.reports)
        self.publisher.on_idle()
        return self.reports[known:]

    @property
    def connections(self) -> list[str]:
        """Connections that were opened and closed."""
        return [event for event in self.events if event.endswith((" connect", " close"))]

    def outcomes(self) -> dict[str, str | None]:
        """Return the errors of the newest report of each engine."""
        return {report.engine_id: report.error for report in self.reports}


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.publisher.close()


def test_an_engine_stands_still_during_its_transfer_and_its_connection_is_kept(parts) -> None:
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
    parts.events.clear()
    parts.send(4)  # its connection is kept
    assert parts.events[:4] == ["e0 pause 4", "e0 send a,b", "e0 end", "e0 resume 4"]
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
        "DeadlineExceeded: version 0 was not taken within 1 s of the last progress: 0 of 2 "
        "tensors are sent; no answer from the sender"
    )
    assert (parts.reports[0].error, first.ended) == (error, error)
    assert (first.serves, second.serves) == (None, 0)
    release.set()
    assert ended.wait(30)
    assert late == ["woke", "woke", "this attempt was given up"]
    assert "e0 end" not in parts.events
    assert "e0 resume 0" not in parts.events
    parts.publisher.close()


def test_a_connection_that_opens_after_the_deadline_is_closed_once_and_not_sent_by() -> None:
    release, closed = threading.Event(), threading.Event()

    class Slow(Sender):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert self.name == "e1" or release.wait(30)

        def send(self, weights: list, transfer: Transfer) -> None:
            self.record("send")
            super().send(weights, transfer)

        def close(self) -> None:
            super().close()
            if self.name == "e0":
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


@pytest.fixture
def together() -> Iterator[Parts]:
    """Send to three engines at once."""
    parts = Parts(engines=3)
    yield parts
    parts.publisher.close()


def test_engines_together_share_one_connection_as_long_as_they_are_the_same(together) -> None:
    together.send(0)
    together.send(1)
    assert together.connections == ["e0+e1+e2 connect"]
    assert [link.serves for link in together.links] == [1, 1, 1]
    pauses = [event for event in together.events[-12:] if "pause" in event]
    assert sorted(pauses) == ["e0 pause 1", "e1 pause 1", "e2 pause 1"]
    together.links[1] = Link("e3", together.events)
    together.seed()
    assert together.connections[1:] == ["e0+e1+e2 close", "e3 connect"]
    together.send(2)
    assert together.connections[3:] == ["e0+e3+e2 connect", "e3 close"]
    together.links[2].busy = True
    together.send(3)
    assert together.connections[5:] == ["e0+e3 connect", "e0+e3+e2 close"]
    together.send(4)
    together.links[2].busy = False
    together.seed()
    assert together.connections[7:] == ["e2 connect"]
    assert [link.serves for link in together.links] == [4, 4, 4]


def test_an_engine_that_cannot_pause_is_left_out_of_the_group(together) -> None:
    first, second, third = together.links

    def dead(version: int, attempt: str) -> None:
        raise ConnectionError("gone")

    first.pause, second.busy = dead, True
    together.send(0)
    assert together.connections == ["e2 connect"]
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

    together.faults["e0"] = between
    second.transfer = die
    together.send(1)
    gone.set()
    shared = "LoadFailed: e1 failed while they took version 1 together: ConnectionError: killed"
    assert together.outcomes() == {"e0": shared, "e1": "ConnectionError: killed", "e2": shared}
    assert [link.ended for link in together.links] == [shared, "ConnectionError: killed", shared]
    assert together.connections[-1] == "e0+e1+e2 close"
    assert together.seed() == []
    together.links[:] = [Link(f"e{number}", together.events) for number in range(3)]
    together.faults.clear()
    together.seed()
    assert [link.serves for link in together.links] == [1, 1, 1]


def test_a_broadcast_that_moves_slowly_is_left_alone_and_one_that_stalls_is_named() -> None:
    together, go_on = Parts(engines=3, timeout=2.0), threading.Event()
    together.faults["e0"] = lambda: time.sleep(1.1)  # longer than the deadline, in all
    together.send(0)
    assert together.outcomes() == {"e0": None, "e1": None, "e2": None}
    together.faults["e0"] = lambda: go_on.wait(30)
    together.send(1)
    go_on.set()
    for error in together.outcomes().values():
        assert error == (
            "DeadlineExceeded: version 1 was not taken within 2 s of the last progress: 0 of 2 "
            "tensors are sent; no answer from the sender"
        )
    together.publisher.close()


def test_only_the_engine_that_does_not_answer_to_a_pause_is_given_up() -> None:
    together, go_on = Parts(engines=3, timeout=1.0), threading.Event()
    together.links[2].pause = lambda version, attempt: go_on.wait(30)
    together.send(0)
    go_on.set()
    outcomes = together.outcomes()
    assert (outcomes["e0"], outcomes["e1"]) == (None, None)
    assert outcomes["e2"].endswith("no answer from e2")
    assert [link.serves for link in together.links] == [0, 0, None]
    together.publisher.close()


@pytest.mark.parametrize(
    ("free", "on_device"),
    [(2 * 28 + 100, True), (2 * 28 + 99, False), (None, False)],
    ids=["room for two versions", "a byte less", "not asked for"],
)
def test_versions_after_the_first_are_copied_on_a_gpu_with_room_for_two_and_a_tenth(
    parts, free, on_device
) -> None:
    """Before the first step nobody knows what a step needs."""
    asked: list[int] = []
    if free is not None:
        parts.publisher.gpu_memory = lambda: (asked.append(len(parts.reports)), (free, 1000))[1]
    copied = []
    for version in range(4):
        parts.send(version)
        copied.append(parts.publisher._newest.snapshot.on_device)
    assert copied == [False, *[on_device] * 3]
    assert asked == ([2] if free is not None else [])
    assert [link.serves for link in parts.links] == [3, 3]
