"""Servers and clients that answer anything: bounded in time and memory, and no secret is shown."""

import asyncio
import http.client
import json
import resource
import socket
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from actors.errors import RewardFailed, RewardModelLost
from actors.rewards.rewards import load_rewards
from deploy.config.loader import load_recipe
from deploy.observability import run_client
from deploy.observability.exporter import Exporter
from deploy.observability.run_client import show
from headway import metrics
from headway.clean_text import printable
from headway.errors import InputError
from headway.metrics import TOKEN_VARIABLE
from queues.records import Prompt
from tests.red_team.servers import ANSWERS, KEY, SLOW, connect, get, hostile_server
from tests.red_team.servers import http as answer_of
from tests.waiting import until

PROMPT = Prompt(prompt_id="red/0/1", text="What is 3+4?", answer="7")
MEMORY_MIB = 200
"""Most that the memory of a client may grow."""


def marked(names):
    """Return parameters of a test; those that take their whole deadline are slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(SLOW) else [])
        for name in names
    ]


@pytest.fixture
def memory():
    """Bound the memory of this process while a server sends gigabytes."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status", encoding="ascii") as file:
        [used] = [int(line.split()[1]) for line in file if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (MEMORY_MIB << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("behaviour", marked(ANSWERS))
async def test_whatever_a_judge_answers_is_a_mark_or_an_error_without_the_key(
    outcomes, memory, monkeypatch, behaviour
):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    with hostile_server(lambda _: behaviour) as (port, keys):
        options = {
            "url": f"http://127.0.0.1:{port}/v1", "model": "m", "key_variable": "JUDGE_KEY",
            "seconds": 2.0, "attempts": 2, "backoff_seconds": 0.01,
        }  # fmt: skip
        rewards = load_rewards(["llm_judge"], options={"llm_judge": options}, timeout=20.0)
        message, outcome, began = "", "mark", time.monotonic()
        try:
            await rewards.score(PROMPT, "7")
        except RewardFailed as error:
            message, outcome = str(error), "failed"
        except RewardModelLost as error:
            message, outcome = str(error), "lost"
        assert time.monotonic() - began < 30.0
        assert keys <= {f"Bearer {KEY}"}
    outcomes["judge", behaviour] = outcome
    assert outcome == ANSWERS[behaviour][1], message
    shown = [message, message.encode().decode("unicode_escape", "replace")]
    assert not any("7e1c" in text or "90ab" in text for text in shown), message
    assert len(message) < 1000


# --- hosts of metrics

TARGETS = json.dumps([{"targets": ["127.0.0.1:{port}"], "labels": {"run": "r", "process": "p"}}])
METRICS = {
    "no number": "headway_version nan\nheadway_last_batch_timestamp_seconds nan\n",
    "infinite": "headway_version inf\nheadway_steps -inf\nheadway_queued_oldest_seconds inf\n"
    'headway_groups{state="queued"} 1\n',
    "bucket without a bound": 'headway_token_lag_bucket{le="x"} 1\n',
    "infinite bucket": 'headway_token_lag_bucket{le="1e999"} 1\nheadway_token_lag_bucket 3\n',
    "wait without an owner": "headway_overdue_wait_seconds 1e308\n",
    "hostile labels": 'headway_overdue_wait_seconds{who="\x1b[2J[red]",on="[/]\u202e"} 7\n',
    "a million series": "".join(f'headway_groups{{state="{n}"}} 1\n' for n in range(20_000)),
    "no metrics": "<html>\n{{{\n",
    "half a line": 'headway_version{engine="a',
    "many digits": f"headway_version {'9' * 4000}\n",
    "time of the far future": "headway_last_batch_timestamp_seconds -1e300\n",
    "updates of no size": "headway_weight_update_bytes_total nan\n",
}
RUNS = {
    "deep JSON": "[" * 500_000,
    "no list": '{"a": 1}',
    "null": "null",
    "numbers": "[1, 2]",
    "no labels": '[{"targets": ["x:1"]}]',
    "hostile names": json.dumps(
        [{"targets": ["127.0.0.1:1"],
          "labels": {"run": "[red]\x1b]0;owned\x07\x1b[2J\u202e", "process": "actor-\x1b[31m"}}]
    ),
    "addresses elsewhere": json.dumps(
        [{"targets": [at], "labels": {"run": "r", "process": at}}
         for at in ("x/../../secret?a=b#:1", "user:password@h:1", "h:1/", "h\r\nX: y:1", "", 7)]
    ),
    "a hundred thousand": json.dumps(
        [{"targets": [""], "labels": {"run": "r", "process": str(n)}} for n in range(50_000)]
    ),
}  # fmt: skip


def looked(port, tmp_path, monkeypatch):
    """Return what `headway top` shows of an address, or the error that it ends with."""
    monkeypatch.setattr(run_client, "ANSWER_SECONDS", 2.0)
    from deploy.runtime.safe_console import SafeConsole

    console = SafeConsole(width=100, force_terminal=False, record=True)
    try:
        show(f"127.0.0.1:{port}", tmp_path, interval=0.01, once=True, console=console)
    except InputError as error:
        return "refused", printable(str(error))
    return "shown", console.export_text()


def serving(texts):
    """Return a server of answers by path; {port} in them is its own."""

    def behaviour(text):
        path = text.split(" ")[1]
        ANSWERS["text"] = (lambda sock, _: sock.sendall(answer_of(texts[path](sock))), "")
        return "text"

    return hostile_server(behaviour)


def own_targets(sock):
    return TARGETS.replace("{port}", str(sock.getsockname()[1]))


HOSTS = {
    **{
        ("metrics", name): {"/targets": own_targets, "/metrics": lambda _, text=text: text}
        for name, text in METRICS.items()
    },
    **{("processes", name): {"/targets": lambda _, text=text: text} for name, text in RUNS.items()},
}


@pytest.mark.parametrize(("kind", "name"), HOSTS)
def test_what_another_host_tells_is_shown_or_refused(
    outcomes, memory, tmp_path, monkeypatch, capsys, kind, name
):
    asked, ask = [], run_client.ask
    monkeypatch.setattr(
        run_client, "ask", lambda client, url, **o: asked.append(url) or ask(client, url, **o)
    )
    with serving(HOSTS[kind, name]) as (port, _):
        outcomes[kind, name], text = looked(port, tmp_path, monkeypatch)
    assert all(c.isprintable() or c == "\n" for c in text)
    paths = ("/targets", f":{port if kind == 'metrics' else 1}/metrics")
    assert all(url.endswith(paths) and "@" not in url for url in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "mark"])
def test_a_host_that_breaks_http_is_refused_in_time(
    outcomes, memory, tmp_path, monkeypatch, capsys, name
):
    began = time.monotonic()
    with hostile_server(lambda _: name) as (port, _):
        outcome, _text = looked(port, tmp_path, monkeypatch)
    outcomes["host", name] = outcome
    assert outcome == "refused"
    assert time.monotonic() - began < 30.0


# --- the server of a run's metrics


class Fixed(Collector):
    def collect(self):
        family = GaugeMetricFamily("headway_reward_part", "", labels=["part"])
        family.add_metric([printable('a"\n\\ \x1b[2J \ud800 [red]')], 1.0)
        yield family


@pytest.fixture
def exporter(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, " mt-5f0e11d2 \n")
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.5)
    recipe = load_recipe("demo", ["deploy.metrics_token=true", "deploy.metrics_port=0"])
    waits = []
    made = Exporter(recipe, tmp_path, Fixed(), list, node="", waits_for=lambda: waits)
    yield SimpleNamespace(port=int(made.address.rpartition(":")[2]), waits=waits, made=made)
    made.close()


REFUSED = {
    "no token": None, "empty": "", "wrong": "Bearer no", "another scheme": "Basic mt-5f0e11d2",
    "a prefix": "Bearer mt-5f0e11d", "no scheme": "mt-5f0e11d2", "a long one": "Bearer " + "x" * 99,
    "bytes": "Bearer \xff\xfe", "the variable": f"Bearer ${TOKEN_VARIABLE}",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_metrics_behind_a_token_are_refused_without_it(outcomes, exporter, name):
    for path in ("/metrics", "/targets", "/", "//metrics", "/healthz/../metrics", "/healthz%2f"):
        assert get(exporter.port, path, REFUSED[name]) == (401, "")
    outcomes["token", name] = "refused"


def test_the_token_opens_metrics_and_health_needs_none(outcomes, exporter):
    status, text = get(exporter.port, "/metrics", "Bearer mt-5f0e11d2")
    assert status == 200
    assert r"\\x1b[2J \\ud800 [red]" in text
    assert get(exporter.port, "/targets", "bearer mt-5f0e11d2")[0] == 200
    assert get(exporter.port, "/healthz") == (200, '{"run": "demo", "status": "ok"}')
    assert get(exporter.port, "/readyz")[0] == 200
    exporter.waits.append("learner")
    status, text = get(exporter.port, "/readyz")
    assert (status, json.loads(text)["waits_for"]) == (503, ["learner"])


async def test_a_driver_that_stands_still_is_not_healthy(exporter, monkeypatch):
    monkeypatch.setattr("deploy.observability.exporter.ANSWER_SECONDS", 0.2)

    following = asyncio.create_task(exporter.made.follow())
    await asyncio.sleep(0.05)
    well, _ = await asyncio.to_thread(get, exporter.port, "/healthz")
    ask = asyncio.get_running_loop().run_in_executor(None, get, exporter.port, "/healthz")
    time.sleep(1.0)  # noqa: ASYNC251
    following.cancel()
    ill, text = await ask
    assert (well, ill) == (200, 503)
    assert "has not answered" in text


def test_a_token_that_is_not_set_is_refused_before_anything_starts(monkeypatch):
    from deploy.observability.exporter import metrics_access

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(InputError, match=f"{TOKEN_VARIABLE} is not set"):
        metrics_access(load_recipe("demo", ["deploy.metrics_token=true"]).deploy)


PATIENT = {
    "says nothing": b"",
    "half a line": b"GET /hea",
    "headers without an end": b"GET /healthz HTTP/1.1\r\nX: ",
    "a body that is awaited": b"POST /page HTTP/1.1\r\nContent-Length: 99\r\nX: ",
    "reads nothing": b"GET /page HTTP/1.1\r\n\r\n",
    "reads no health": b"GET /healthz HTTP/1.1\r\n\r\n",
}


@pytest.mark.reported("healthz_loris")
@pytest.mark.parametrize("name", PATIENT)
def test_clients_that_take_for_ever_keep_nobody_from_the_health_and_are_cut_off(
    outcomes, monkeypatch, name
):
    """Each goes on sending a byte, and takes in none of a page larger than any buffer."""
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(metrics, "CONNECTIONS", 4)
    pages = {
        "/healthz": metrics.Page(lambda: (True, "well"), public=True),
        "/page": metrics.Page(lambda: (True, "x" * (8 << 20))),
    }
    server = metrics.MetricsServer([], metrics.MetricsAccess("127.0.0.1"), pages=pages)
    began = time.monotonic()
    clients = [connect(server.port) for _ in range(32)]

    def are_cut_off():
        for client in [*clients]:
            with suppress(BlockingIOError):
                try:
                    client.send(b"a", socket.MSG_DONTWAIT)
                except OSError:
                    clients.remove(client)
                    client.close()
        assert get(server.port, "/healthz") == (200, '"well"')
        return not clients

    for client in clients:
        with suppress(OSError):
            client.sendall(PATIENT[name])
    until(are_cut_off, 10.0)
    assert time.monotonic() - began < 5.0
    until(lambda: get(server.port, "/page")[0] == 200, 5.0)
    outcomes["patient", name] = "cut off"
    server.close()


CLIENTS = {
    "says nothing": b"",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    "bad version": b"GET / HTTP/99.99\r\n\r\n",
    "bytes": b"GET /\xff\xfe\x00 HTTP/1.1\r\n\r\n",
    "post": b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999\r\n\r\nabc",
    "unknown method": b"BREW /healthz HTTP/1.1\r\n\r\n",
    "many names": b"GET /metrics?" + b"name[]=x&" * 5000 + b" HTTP/1.1\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_hostile_client_stops_no_other(outcomes, exporter, name, capfd):
    open_connections = [connect(exporter.port) for _ in range(2 * metrics.CONNECTIONS)]
    for connection in open_connections:
        with suppress(OSError):
            connection.sendall(CLIENTS[name])

    def answers_others():
        with suppress(OSError, http.client.HTTPException):
            return get(exporter.port, "/healthz")[0] == 200

    until(answers_others, 20.0)
    for connection in open_connections:
        connection.close()
    outcomes["client", name] = "answered others"
    assert capfd.readouterr().err == ""
