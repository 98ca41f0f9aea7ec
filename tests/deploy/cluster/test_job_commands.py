"""A job is followed to its exit code, whatever happens to the connection, and left by Ctrl-C."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from deploy.cluster.jobs import PAUSES_SECONDS, Jobs
from deploy.errors import RunFailed

ADDRESS = "http://127.0.0.1:8265"


class Client:
    """Stands for Ray's: a script of logs and of answers; an exception among them is raised."""

    def __init__(self, logs, statuses, code=0):
        self.logs, self.statuses, self.code = list(logs), list(statuses), code

    async def tail_job_logs(self, job):
        for text in self.logs.pop(0):
            if isinstance(text, Exception):
                raise text
            yield text

    def get_job_status(self, job):
        answer = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(value=answer)

    def get_job_info(self, job):
        status = self.get_job_status(job)
        return SimpleNamespace(status=status, driver_exit_code=self.code, message="")


@pytest.fixture
def pauses():
    """Seconds of each pause, none of which takes time."""
    return []


def jobs(monkeypatch, client, pauses):
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: client)
    return Jobs(ADDRESS, pauses.append)


def test_a_log_that_breaks_often_is_followed_as_long_as_text_comes(monkeypatch, pauses):
    texts = [f"line {number}\n" for number in range(3 * len(PAUSES_SECONDS))]
    broken = RuntimeError("WebSocket connection closed unexpectedly")
    logs = [[*texts[: number + 1], broken] for number in range(len(texts))]
    statuses = [*["RUNNING"] * len(texts), "FAILED"]
    printed = []
    followed = jobs(monkeypatch, Client(logs, statuses, code=7), pauses)
    assert followed.follow("job", printed.append) == 7
    assert printed == texts
    assert set(pauses) == {PAUSES_SECONDS[0]}


def test_a_log_that_breaks_off_goes_on_at_the_very_character(monkeypatch, pauses):
    logs = (["one\n", "tw", RuntimeError("closed")], ["one\ntwo\n", "th"], ["one\ntwo\nthree\n"])
    printed = []
    client = Client(logs, ["RUNNING", "RUNNING", "RUNNING", "FAILED"], code=7)
    assert jobs(monkeypatch, client, pauses).follow("job", printed.append) == 7
    assert ("".join(printed), pauses) == ("one\ntwo\nthree\n", [0.5, 0.5])


def test_a_log_that_brings_nothing_again_and_again_is_given_up(monkeypatch, pauses):
    logs = [[ConnectionResetError("reset by peer")]] * len(PAUSES_SECONDS)
    followed = jobs(monkeypatch, Client(logs, ["RUNNING"]), pauses)
    with pytest.raises(RunFailed, match=r"broke off 6 times \(reset by peer\).*headway attach job"):
        followed.follow("job", pytest.fail)
    assert pauses == list(PAUSES_SECONDS)


def test_a_cluster_that_is_away_for_a_while_costs_no_exit_code(monkeypatch, pauses):
    away = [ConnectionError("refused")] * 3
    client = Client([["text"]], ["RUNNING", *away, "SUCCEEDED", *away, "SUCCEEDED"])
    printed = []
    assert jobs(monkeypatch, client, pauses).follow("job", printed.append) == 0
    assert printed == ["text"]
    assert pauses == [0.5, 1.0, 2.0] * 2


def test_a_cluster_that_stays_away_is_named(monkeypatch, pauses):
    client = Client([["text"]], ["RUNNING", ConnectionError("refused")])
    with pytest.raises(RunFailed, match=rf"cluster at {ADDRESS} does not answer \(refused\)"):
        jobs(monkeypatch, client, pauses).follow("job", lambda _: None)


def test_what_the_terminal_refuses_is_not_taken_for_a_broken_log(monkeypatch, pauses):
    def closed(text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        jobs(monkeypatch, Client([["text"]], ["RUNNING"]), pauses).follow("job", closed)


def test_an_interrupt_ends_following_and_closes_the_log(monkeypatch, pauses):
    closed = []

    class Waiting(Client):
        async def tail_job_logs(self, job):
            try:
                yield "text"
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                closed.append(job)

    printed = []
    with pytest.raises(KeyboardInterrupt):
        jobs(monkeypatch, Waiting([], ["RUNNING"]), pauses).follow("job", printed.append)
    assert (printed, closed, pauses) == (["text"], ["job"], [])
