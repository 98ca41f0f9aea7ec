"""Unstaged updates: the pause covers the transfer, and a failure keeps it until one succeeds."""

import threading
from collections.abc import Callable

import pytest
import torch

from weight_sync.announcements import SwapReport
from weight_sync.direct import DirectEngines
from weight_sync.errors import VersionOrderError

TENSORS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]


class Link:
    """An engine that writes down what is asked of it, with a fence as `EngineLink.resume` says."""

    def __init__(self, engine_id: str, events: list[str]) -> None:
        self.engine_id, self.workers, self._events = engine_id, 1, events
        self.paused_for: int | None = None
        self.serves: int | None = None

    def say(self, event: str) -> None:
        self._events.append(f"{self.engine_id} {event}")

    def pause(self, version: int) -> None:
        self.say(f"pause {version}")
        self.paused_for = version

    def transfer(self, method: str, payload: dict | None) -> None:
        self.say(method)

    def resume(self, version: int) -> None:
        if self.paused_for == version:
            self.say(f"resume {version}")
            self.paused_for, self.serves = None, version


class Sender:
    """Sends through the link's `transfer`; fails or hangs on demand."""

    def __init__(self, link: Link, faults: dict[str, Callable[[], None]]) -> None:
        self._link, self._faults = link, faults
        link.say("connect")

    def send(self, weights: list) -> None:
        self._link.transfer(f"send {','.join(name for name, _ in weights)}", None)
        self._faults.get(self._link.engine_id, lambda: None)()

    def close(self) -> None:
        self._link.say("close")


@pytest.fixture
def make():
    """What sends to two engines, its events, the engines, and faults by engine."""
    events: list[str] = []
    faults: dict[str, Callable[[], None]] = {}
    links = [Link("e0", events), Link("e1", events)]
    reports: list[SwapReport] = []
    publisher = DirectEngines(
        lambda: links, lambda link, weights: Sender(link, faults), reports.append, timeout=5
    )
    yield publisher, events, links, faults, reports
    publisher.close()


def test_every_engine_stands_still_from_before_its_transfer_until_after_it(make) -> None:
    publisher, events, _, _, reports = make
    assert publisher.send(3, TENSORS) == reports
    assert events == [
        f"{engine} {event}"
        for engine in ("e0", "e1")
        for event in ("pause 3", "connect", "send a,b", "resume 3")
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
    assert events[:3] == ["e0 pause 1", "e0 send a,b", "e0 resume 1"]
    assert not reports[-1].seeding


def test_an_engine_whose_transfer_failed_stays_paused_until_the_next_version_is_in(make) -> None:
    publisher, events, (first, second), faults, reports = make
    publisher.send(0, TENSORS)
    events.clear()

    def fail() -> None:
        raise ConnectionResetError("a cable")

    faults["e0"] = fail
    publisher.send(1, TENSORS)
    assert (first.serves, first.paused_for) == (0, 1)
    assert (second.serves, second.paused_for) == (1, None)
    assert reports[-2].error == "ConnectionResetError: a cable"
    assert reports[-2].swap_finished_at is None
    assert events[:3] == ["e0 pause 1", "e0 send a,b", "e0 close"]
    faults.clear()
    events.clear()
    publisher.send(2, TENSORS)
    assert events[:4] == ["e0 pause 2", "e0 connect", "e0 send a,b", "e0 resume 2"]
    assert (first.serves, first.paused_for) == (2, None)


def test_an_engine_that_hangs_is_left_behind_and_never_wakes_by_itself(make) -> None:
    publisher, events, (first, second), faults, reports = make
    publisher._timeout = 0.2
    release, ended = threading.Event(), threading.Event()

    def hang() -> None:
        assert release.wait(30)
        ended.set()

    faults["e0"] = hang
    publisher.send(0, TENSORS)
    assert reports[0].error == "DeadlineExceeded: e0 did not take version 0 within 0.2 s"
    assert (first.serves, second.serves) == (None, 0)
    release.set()
    assert ended.wait(30)
    faults.clear()
    publisher.send(1, TENSORS)
    assert (first.serves, second.serves) == (1, 1)
    assert "e0 resume 0" not in events


def test_a_late_resume_of_an_abandoned_transfer_does_not_wake_an_engine() -> None:
    link = Link("e0", [])
    link.pause(0)
    link.pause(1)
    link.resume(0)
    assert (link.paused_for, link.serves) == (1, None)


def test_an_engine_made_again_is_connected_anew_and_one_that_left_is_forgotten(make) -> None:
    publisher, events, links, _, _ = make
    publisher.send(0, TENSORS)
    again = Link("e0", events)
    links[:] = [again]
    events.clear()
    publisher.send(1, TENSORS)
    assert events == ["e1 close", "e0 close", "e0 pause 1", "e0 connect", "e0 send a,b",
                      "e0 resume 1"]  # fmt: skip
    assert again.serves == 1


def test_seeding_reaches_those_alone_that_do_not_serve_the_newest_version(make) -> None:
    publisher, events, links, faults, reports = make
    assert publisher.seed(TENSORS) == []

    def fail() -> None:
        raise ConnectionResetError("a cable")

    faults["e0"] = fail
    publisher.send(3, TENSORS)
    faults.clear()
    events.clear()
    links.append(Link("e2", events))
    assert [(r.engine_id, r.version, r.error) for r in publisher.seed(TENSORS)] == [
        ("e0", 3, None),
        ("e2", 3, None),
    ]
    assert events == [
        f"{engine} {event}"
        for engine in ("e0", "e2")
        for event in ("pause 3", "connect", "send a,b", "resume 3")
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

    from weight_sync.vllm_sender import VllmSender

    calls: list[tuple[str, dict | None]] = []
    sent: list[str] = []

    class Endpoint(Link):
        def transfer(self, method: str, payload: dict | None) -> None:
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
    sender = VllmSender("nccl", Endpoint("e0", []), TENSORS, "127.0.0.1", "cpu")
    assert [method for method, _ in calls] == ["init_weight_transfer_engine"]
    init = nccl_engine.NCCLWeightTransferInitInfo(**calls[0][1])
    assert (init.rank_offset, init.world_size, init.packed) == (1, 2, True)
    calls.clear()
    sender.send(TENSORS)
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
