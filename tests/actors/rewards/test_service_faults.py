"""Services that are away or answer badly: a run waits, goes on, or fails with their names.

Against a real server on this machine; the clock of the waits is the test's, which never sleeps.
"""

import asyncio
import email.utils
import http.server
import os
import socket
import struct
import threading
import time
import urllib.request
from contextlib import contextmanager

import aiohttp
import httpx
import pytest
import requests
from fakes import POOL

from actors.errors import EnvironmentFailed, RewardFailed, ServiceAway, ServiceLost
from actors.outages import LONGEST_PAUSE, Outages, outage, seconds_asked, timeout
from actors.rewards.rewards import load_rewards
from queues.records import Prompt

OWN = "judged:score"
"""The reward that asks the address which is the answer of its prompt; a judge marks with 0.7."""


class Judge(http.server.ThreadingHTTPServer):
    """Misbehaves in turn, and answers well when nothing is left of what it was given."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *faults, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.faults = list(faults)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        poison = "reset" if "poison" in self.path else "0.7"
        fault = self.server.faults.pop(0) if self.server.faults else poison
        status, headers = (fault, {}) if isinstance(fault, int) else (200, {})
        if isinstance(fault, tuple):
            status, headers = fault
        if fault == "slow":
            time.sleep(1)
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif fault != "hangs up":
            body = (
                "" if fault in ("empty", "slow") or status != 200 else fault.removeprefix("half ")
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            missing = 100 if body != fault and status == 200 and fault != "empty" else 0
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body.encode())
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@contextmanager
def judging(*faults, port=0):
    judge = Judge(*faults, port=port)
    try:
        yield f"http://127.0.0.1:{judge.server_port}"
    finally:
        judge.shutdown()
        judge.server_close()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Clock:
    """A clock that moves by the pauses of who waits, and calls `at` once it has passed a time."""

    def __init__(self, at=None, then=None):
        self.now, self.pauses, self.at, self.then = 1.0, [], at, then

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
        if self.at is not None and self.now >= self.at:
            self.at = self.then()


def mark(url, clock, *, seconds=600.0, outages=None, name=OWN, **settings):
    """Return the score that a rollout gets for a completion, as its actor waits for it."""
    rewards = load_rewards([name], pool=POOL, **settings)
    outages = outages or Outages(seconds, sleep=clock.sleep, now=lambda: clock.now)

    async def go():
        async with timeout(30, outages):
            prompt = Prompt(prompt_id="p/0/1", text="3+4=", answer=url)
            return (await rewards.score(prompt, "7")).total

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("faults", "pauses"),
    [
        (["hangs up"], 1),
        (["reset"] * 3, 3),
        (["slow"], 1),
        (["half 0."], 1),
        ([500, 502, 503, 504, 529], 5),
        ([(429, {"Retry-After": "40"}), (503, {"Retry-After": "soon"})], 2),
        ([408, "reset", 500, "hangs up"], 4),
    ],
)
def test_a_service_that_fails_in_passing_is_asked_again_after_growing_pauses(faults, pauses):
    clock = Clock()
    with judging(*faults) as url:
        assert mark(f"{url}/slow" if "slow" in faults else url, clock) == 0.7
    assert len(clock.pauses) == pauses
    asked = 40.0 if isinstance(faults[0], tuple) else 0.0
    assert asked <= clock.pauses[0] <= max(asked, 1.0)
    assert all(pause <= max(asked, LONGEST_PAUSE) for pause in clock.pauses)


@pytest.mark.parametrize("function", ["score", "score_later"])
def test_a_service_that_hangs_is_away_though_the_reward_sets_no_deadline(function, caplog):
    clock, name = Clock(), f"judged:{function}"
    with judging("slow") as url:
        assert mark(url, clock, name=name, timeout=0.5) == 0.7
    assert len(clock.pauses) == 1
    assert "took longer than 0.5 s" in caplog.text
    assert "judged.py" in caplog.text


@pytest.mark.parametrize("away", [3.0, 60.0, 590.0])
def test_a_service_that_is_away_at_first_is_waited_for(away):
    port, servers = free_port(), []
    clock = Clock(away, lambda: servers.append(Judge(port=port)))
    assert mark(f"http://127.0.0.1:{port}", clock) == 0.7
    servers[0].shutdown()
    servers[0].server_close()
    assert away - 1 <= sum(clock.pauses) <= away + LONGEST_PAUSE


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("seven", "could not convert string to float: b'seven'"),
        ("empty", "could not convert string to float: b''"),
        ("nan", "returned nan"),
        (404, "HTTPError 404"),
        (401, "HTTPError 401"),
        (501, "HTTPError 501"),
    ],
)
def test_a_wrong_answer_is_no_outage_and_no_score(fault, message):
    clock = Clock()
    with (
        judging(fault) as url,
        pytest.raises(RewardFailed, match="reward 'judged:score' of prompt 'p/0/1'") as caught,
    ):
        mark(url, clock)
    assert message in str(caught.value)
    assert clock.pauses == []


def test_a_service_that_stays_away_ends_the_run_and_is_named_with_who_waits(caplog):
    clock = Clock()
    url = f"http://127.0.0.1:{free_port()}"
    outages = Outages(50.0, sleep=clock.sleep, now=lambda: clock.now)
    with pytest.raises(ServiceLost) as caught:
        mark(url, clock, outages=outages)
    assert "reward 'judged:score' has waited 50 s (actors.outage_seconds = 50)" in str(caught.value)
    assert "once it answers, `headway resume` goes on" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert sum(clock.pauses) == pytest.approx(50.0)
    [(who, cause, seconds)] = outages.reports()
    assert (who, "refused" in cause) == ("reward 'judged:score'", True)
    assert seconds == pytest.approx(50.0)
    assert len([x for x in caplog.messages if "waits on a service that is away" in x]) == 1


def test_what_alone_breaks_a_service_that_answers_others_counts_against_its_rollout():
    clock = Clock()
    with judging() as url:
        outages = Outages(600.0, sleep=clock.sleep, now=lambda: clock.now)

        async def others(seconds):
            await clock.sleep(seconds)
            await outages.ask("reward 'judged:score'", lambda: asyncio.sleep(0), RewardFailed)

        outages._sleep = others
        with pytest.raises(RewardFailed, match="others are answered, and this is not"):
            mark(f"{url}/poison", clock, outages=outages)
    assert len(clock.pauses) == 5


@pytest.mark.parametrize(("answered", "error"), [(True, EnvironmentFailed), (False, ServiceLost)])
async def test_a_step_that_alone_stays_unanswered_ends_no_run_at_the_end_of_its_wait(
    answered, error
):
    """A policy may have named an address that never answers."""
    clock, step = Clock(), "step of environment 'web'"
    outages = Outages(60.0, sleep=clock.sleep, now=lambda: clock.now)

    async def hangs():
        if answered:
            await outages.ask(step, lambda: asyncio.sleep(0), EnvironmentFailed)
        raise ServiceAway("no answer")

    with pytest.raises(error, match="no answer"):
        await outages.ask(step, hangs, EnvironmentFailed)
    assert sum(clock.pauses) == pytest.approx(60.0)


def test_an_outage_after_a_moment_in_which_others_were_answered_counts_against_nobody():
    clock = Clock()
    outages = Outages(600.0, sleep=clock.sleep, now=lambda: clock.now)

    async def others(seconds):
        await clock.sleep(seconds)
        if clock.now < 2.0:
            await outages.ask("reward 'judged:score'", lambda: asyncio.sleep(0), RewardFailed)

    outages._sleep = others
    with judging(*["reset"] * 12) as url:
        assert mark(url, clock, outages=outages) == 0.7
    assert len(clock.pauses) == 12


def test_a_judge_of_ours_that_is_away_is_waited_for_and_asked_no_more_than_it_wants():
    clock = Clock()
    options = {"llm_judge": {"model": "m", "attempts": 1}}
    with judging(*[(501, {})] * 9) as url:
        away = {**options["llm_judge"], "url": f"http://127.0.0.1:{free_port()}/v1"}
        with pytest.raises(ServiceLost, match="does not answer"):
            mark("", clock, seconds=5.0, name="llm_judge", options={"llm_judge": away})
        refuses = {**options["llm_judge"], "url": url}
        with pytest.raises(RewardFailed, match="answered 501"):
            mark("", clock, name="llm_judge", options={"llm_judge": refuses})


def raised(call, *arguments):
    """Return the error of a call, or of a coroutine that it makes."""
    try:
        made = call(*arguments)
        asyncio.run(made) if asyncio.iscoroutine(made) else made
    except Exception as error:  # noqa: BLE001  (of any client)
        return error
    raise AssertionError("no error")


def get_httpx(url, seconds):
    httpx.get(url, timeout=seconds).raise_for_status()


def get_requests(url, seconds):
    requests.get(url, timeout=seconds).raise_for_status()


def get_urllib(url, seconds):
    urllib.request.urlopen(url, timeout=seconds).read()


def get_wrapped(url, seconds):
    try:
        get_httpx(url, seconds)
    except httpx.HTTPError as error:
        raise RuntimeError("no mark") from error


def get_grouped(url, seconds):
    raise ExceptionGroup("several", [KeyError("a"), raised(get_urllib, url, seconds)])


async def get_aiohttp(url, seconds):
    limit = aiohttp.ClientTimeout(total=seconds)
    async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
        answer.raise_for_status()
        await answer.read()


async def get_late(url, seconds):
    async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=None) as client:
        (await client.get(url)).raise_for_status()


CLIENTS = [get_httpx, get_requests, get_urllib, get_aiohttp, get_wrapped, get_grouped, get_late]


@pytest.mark.parametrize("get", CLIENTS)
@pytest.mark.parametrize("fault", ["refused", "reset", "hangs up", "slow", 429, 500, 503, 404])
def test_errors_of_clients_tell_a_service_that_is_away_from_one_that_refuses(get, fault):
    faults = (
        [] if fault == "refused" else [(fault, {"Retry-After": "9"}) if fault == 429 else fault]
    )
    with judging(*faults * 2) as url:
        address = f"http://127.0.0.1:{free_port()}" if fault == "refused" else url
        error = raised(get, address, 0.3 if fault == "slow" else 20.0)
    described = outage(error)
    assert (described is None) == (fault == 404), repr(error)
    if described:
        assert described.retry_after == (9.0 if fault == 429 else 0.0)


def computing():
    raise TimeoutError("the proof took too long")


async def thinking():
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)


def hiding():
    try:
        raise ConnectionError("no judge")
    except ConnectionError:
        raise ValueError("a bad mark") from None


class TimeoutException(Exception):
    """As libraries raise it that verify answers within a limit."""


def verifying():
    raise TimeoutException


@pytest.mark.parametrize(
    "call",
    [computing, thinking, hiding, verifying, lambda: float("x"), lambda: os.stat("/no/file")],
)
def test_errors_of_computations_are_no_outages(call):
    assert outage(raised(call)) is None


def test_an_error_that_users_raise_says_how_long_to_wait():
    described = outage(ServiceAway("the judge rests", retry_after=7.0))
    assert (str(described), described.retry_after) == ("the judge rests", 7.0)
    assert described.reason == "infrastructure"


def test_a_pause_that_is_asked_for_is_seconds_or_a_date():
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 95 < seconds_asked(later) <= 100
    assert seconds_asked(email.utils.formatdate(0, usegmt=True)) == 0.0
    values = ["3", "1.5", 0, "-1", "nan", "inf", "soon", "", None]
    assert [seconds_asked(value) for value in values] == [3.0, 1.5, *[0.0] * 7]


async def test_a_wait_does_not_count_against_the_deadline_of_a_rollout():
    outages, calls = Outages(600.0), []

    async def call():
        calls.append(None)
        if len(calls) == 1:
            raise ServiceAway("away")
        return 1

    async with timeout(0.3, outages) as deadline:
        before = deadline.when()
        assert await outages.ask("reward 'x'", call, RewardFailed) == 1
    assert deadline.when() - before > 0.4
    assert not deadline.expired()
