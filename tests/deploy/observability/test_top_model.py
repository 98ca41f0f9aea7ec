"""`headway top`: its figures, its frames, and how it reaches a run."""

import io
import json
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console

from deploy.config.loader import load_recipe
from deploy.config.recipe_text import recipe_text
from deploy.observability.exporter import Exporter
from deploy.observability.run_client import RunClient, RunEnded, connect, events, show
from deploy.observability.top_model import (
    TOKENS,
    Interval,
    Moment,
    actor_state,
    agent_waits,
    parse,
    token_lags,
    troubles,
    update_seconds,
)
from deploy.observability.top_view import ACTORS, screen
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError

GOLDEN = Path(__file__).parents[1] / "top_frame.txt"


def scrape(**values):
    """Return samples of one process: `name__label__value=number`."""
    lines = []
    for key, value in values.items():
        name, *labels = key.split("__")
        pairs = ",".join(
            f'{label}="{text}"' for label, text in zip(labels[::2], labels[1::2], strict=True)
        )
        lines.append(f"headway_{name}{{{pairs}}} {value}" if pairs else f"headway_{name} {value}")
    return parse("\n".join(lines) + "\n", source="a test")


def moment(at, **processes):
    named = {name.replace("_", "-"): samples for name, samples in processes.items()}
    return Moment(at, "mine", named)


def actor(tokens, *, running=1, idle=0.0, serving=10.0):
    return scrape(
        tokens_generated_total=tokens, running_rollouts=running,
        idle_seconds_total__on__leases=idle, serving_seconds_total=serving,
    )  # fmt: skip


def lags(*counts):
    tops = ("0.0", "1.0", "2.0", "3.0", "4.0", "6.0", "+Inf")
    buckets = zip(tops, counts, strict=True)
    return scrape(**{f"token_lag_bucket__le__{top}": count for top, count in buckets})


def test_rates_are_what_was_gained_between_two_moments():
    before = scrape(version=4, groups__state__queued=3, groups__state__trained=8)
    now = scrape(
        version=6, groups__state__queued=5, groups__state__ready=2, groups__state__trained=12
    )
    interval = Interval(moment(104.0, broker=now), moment(100.0, broker=before))
    assert interval.rate("headway_version") == 0.5
    assert interval.rate_of_groups() == 2.0
    assert interval.rate_of_groups("queued") == 1.5
    assert interval.rate_of_groups("queued", "leased", "ready", "dropped", "failed") == 1.0
    assert interval.rate(TOKENS) is None
    only = Interval(interval.now)
    assert only.now.value("headway_version") == 6
    assert only.rate("headway_version") is None, "the first moment has no rates yet"


def test_an_actor_that_was_restarted_counts_from_0():
    before = moment(100.0, actor_0=actor(5000), actor_1=actor(10))
    interval = Interval(moment(102.0, actor_0=actor(30), actor_1=actor(20)), before)
    assert interval.rate(TOKENS, "actor-0") == 15.0
    assert interval.rate(TOKENS) == 20.0


@pytest.mark.parametrize(
    ("samples", "state"),
    [
        (actor(5), "generates"),
        (actor(5, running=0), "waits for prompts"),
        (actor(0, running=0, serving=0.0), "loads the model or its first weights"),
        (None, "does not answer"),
    ],
)
def test_the_state_of_an_actor(samples, state):
    assert actor_state("actor-0", moment(1.0, actor_0=samples)) == state


@pytest.mark.parametrize(
    ("process", "samples", "trouble"),
    [
        ("broker", None, "broker does not answer"),
        (
            "driver",
            scrape(overdue_wait_seconds__who__learner__on__engine=61),
            "learner waits on engine for 61 s",
        ),
    ],
)
def test_what_needs_attention_is_told_and_the_rest_is_shown(process, samples, trouble):
    now = moment(1.0, actor_0=actor(5), **{process: samples})
    assert troubles(now) == [trouble]
    assert actor_state("actor-0", now) == "generates"


SAME = (1, 3, 4, 4, 4, 4, 4)


@pytest.mark.parametrize(
    ("before", "now", "shares"),
    [
        ((10,) * 7, (10, 13, 13, 13, 13, 14, 14), {"1": 0.75, "5–6": 0.25}),
        (SAME, SAME, {"0": 0.25, "1": 0.5, "2": 0.25}),
        (None, (0, 0, 0, 0, 0, 0, 2), {"7–": 1.0}),
    ],
    ids=["of the tokens trained in between", "of all if there were none", "above the last bucket"],
)
def test_lags_of_tokens(before, now, shares):
    earlier = before and moment(0.0, learner=lags(*before))
    assert token_lags(Interval(moment(1.0, learner=lags(*now)), earlier)) == shares


def test_an_update_is_shown_with_its_mean_duration_in_between():
    def updates(seconds, count):
        return scrape(
            weight_update_seconds_total__engine__e__phase__serve=seconds,
            weight_update_seconds_total__engine__e__phase__pause=77,
            weight_updates_total__engine__e=count,
        )

    now, before = moment(2.0, driver=updates(7.0, 4)), moment(0.0, driver=updates(1.0, 2))
    interval = Interval(now, before)
    assert update_seconds(interval) == 3.0
    assert interval.rate("headway_weight_updates_total") == 1.0


def frame(width=100):
    """Print a frame of a run that is going on."""

    def at(when, version, tokens, waited):
        broker = scrape(
            version=version, steps=60, live_groups=5, window_groups=6, ready_oldest_seconds=0.5,
            queued_oldest_seconds=7.0, learner_waits_for_groups=1,
            results_accepted_total=version * 4, groups__state__queued=2, groups__state__leased=3,
            groups__state__ready=1, groups__state__trained=version * 4, groups__state__failed=1,
            **{f"engine_version__engine__engine-{n}": version - n for n in range(2)},
        )  # fmt: skip
        learner = scrape(
            tokens_trained_total=tokens, learner_seconds_total__phase__wait=waited,
            learner_seconds_total__phase__step=waited * 3, last_batch_timestamp_seconds=when - 3,
            reward_mean=0.25, ess=0.875,
        )  # fmt: skip
        return moment(
            when,
            driver=scrape(max_staleness=2, heldout_score__kind__greedy=0.5),
            broker=broker,
            learner=[*learner, *lags(0, *[tokens] * 6)],
            actor_0=actor(tokens, running=4, idle=waited),
            actor_1=None,
        )

    happened = [(850.0, "checkpoint of version 20"), (990.0, "[actor-1] was restarted")]
    interval = Interval(at(1000.0, 24, 12_000, 4.0), at(990.0, 22, 2_000, 2.0))
    return printed(screen(interval, happened, width=width), width)


def test_a_frame_as_it_is_printed():
    """Written anew by `python tests/deploy/observability/test_top_model.py`, to be looked at."""
    assert frame() == GOLDEN.read_text()


def printed(shown, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def test_a_frame_of_80_columns_is_not_cut():
    text = frame(width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "─▶ take 0.8 groups/s, 1,000 tokens/s" in text
    assert "─▶ weights – updates/s, –/s, – to serve" in text
    assert "─▶ ack 0.2 batches/s: 5 of 6 groups live, issued 0.8/s" in text


def test_a_frame_of_a_run_that_starts_shows_no_troubles():
    text = printed(screen(Interval(moment(1.0, driver=scrape(max_staleness=2))), width=80), 80)
    assert "does not answer" not in text
    assert "learner  v–/–" in text


def test_of_many_actors_those_that_generate_least_are_shown():
    many = {f"actor_{index}": actor(index) for index in range(ACTORS + 3)}
    idle = {name: actor(0) for name in many}
    text = printed(screen(Interval(moment(1.0, **many), moment(0.0, **idle))))
    assert "and 3 that generate more" in text
    assert "actor-15 " in text
    assert "actor-16 " not in text


@pytest.fixture
def open_exporter(tmp_path):
    """Return a function that starts the exporter of a run in the folder."""
    with ExitStack() as stack:

        def opened():
            recipe, metrics = load_recipe("demo", ["name=mine"]), CollectorRegistry()
            Gauge("headway_version", "", registry=metrics).set(7)
            made = Exporter(recipe, tmp_path, metrics, lambda: [("broker", "127.0.0.1:1")], node="")
            made.write()
            stack.callback(made.close)
            return made

        yield opened


@pytest.fixture
def exporter(tmp_path, open_exporter):
    (tmp_path / "recipe.toml").write_text("")
    return open_exporter()


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def ended(tmp_path):
    """Provide the folder of a run that is done."""
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))
    return tmp_path


@pytest.mark.parametrize("by", ["folder", "address", "url"])
def test_a_run_is_found_by_its_folder_and_by_its_address(exporter, tmp_path, by):
    address = exporter.address
    name = {"folder": str(tmp_path), "address": address, "url": f"http://{address}/targets"}[by]
    now = RunClient(name, tmp_path).look().now
    assert (now.run, now.value("headway_version")) == ("mine", 7)
    assert troubles(now) == ["broker does not answer"]


def test_a_run_without_metrics_says_where_its_figures_are(ended):
    with pytest.raises(InputError, match=r"its status is done.*headway report"):
        RunClient(str(ended), ended)


@pytest.fixture
def held(tmp_path):
    """Provide a run folder that a command works on."""
    (tmp_path / "recipe.toml").write_text(recipe_text(load_recipe("demo")))
    with RunDirectory(tmp_path).held():
        yield tmp_path


def test_a_run_that_has_just_been_started_is_waited_for(held, open_exporter, console):
    threading.Timer(0.3, open_exporter).start()
    show(str(held), held, interval=0.01, once=True, console=console)
    text = console.file.getvalue()
    assert "shows no metrics yet\nwaiting for it to start" in text
    assert "version 7" in text


def test_a_run_that_goes_on_without_metrics_says_so(held):
    config = load_recipe("demo", ["deploy.metrics=false"])
    (held / "recipe.toml").write_text(recipe_text(config))
    with pytest.raises(InputError, match=r"goes on with deploy\.metrics = false"):
        RunClient(str(held), held)


def test_a_run_whose_folder_is_not_there_yet_is_waited_for(held, open_exporter, console):
    open_exporter()
    elsewhere = held.with_name("elsewhere")
    held.rename(elsewhere)
    threading.Timer(0.3, elsewhere.rename, [held]).start()
    client = connect(held.name, held.parent, console, seconds=60.0)
    assert client.look().now.value("headway_version") == 7
    assert "waiting for it to start" in console.file.getvalue()


def test_a_name_that_is_no_run_is_refused_at_last(tmp_path, console):
    with pytest.raises(InputError, match="no run 'mine'"):
        show("mine", tmp_path, interval=0.01, once=True, console=console)


def test_an_address_where_nobody_is_says_so(tmp_path):
    with pytest.raises(InputError, match=r"nothing answers at http://127.0.0.1:1/targets"):
        RunClient("127.0.0.1:1", tmp_path).look()


@pytest.fixture
def answering():
    """Serve answers one after another: raw bytes, or None for no answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers, port = [], server.getsockname()[1]

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(4096)
                        answer = answers.pop(0) if answers else None
                        if answer is not None:
                            connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{port}", answers
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def http(text):
    return b"HTTP/1.0 200 OK\r\n\r\n" + text.encode()


def targets(address):
    labels = {"run": "mine", "process": "driver", "role": "driver"}
    return http(json.dumps([{"targets": [address], "labels": labels}]))


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.2\r\n", http("no metrics {"), http("a b c d")]
)
def test_a_process_that_says_something_else_is_one_that_does_not_answer(answering, tmp_path, said):
    address, answers = answering
    answers += [targets(address), said]
    assert troubles(RunClient(address, tmp_path).look().now) == ["driver does not answer"]


def test_a_live_view_outlasts_looks_that_fail_and_ends_with_the_run(answering, tmp_path, console):
    address, answers = answering
    good = [targets(address), http("headway_version 7\n")]
    answers += [*good, None, None, *good, None, http("[]"), None, *good]
    show(address, tmp_path, interval=0.01, once=False, console=console)
    assert "nothing answers at" in " ".join(console.file.getvalue().split())
    assert answers == good


def test_a_live_view_of_a_folder_ends_with_the_status_of_the_run(answering, ended, console):
    address, answers = answering
    answers += [targets(address), http("headway_version 7\n")]
    (ended / "targets.json").write_bytes(targets(address).partition(b"\r\n\r\n")[2])
    with pytest.raises(RunEnded, match="its status is done"):
        show(str(ended), ended, interval=0.01, once=False, console=console)
    assert "version 7" in console.file.getvalue()


def test_events_come_from_restarts_failed_updates_and_checkpoints_in_order(tmp_path):
    directory = RunDirectory(tmp_path)
    swap = {"engine_id": "engine-0", "version": 3, "published_at": 20.0}
    append_rows(tmp_path / "swaps.jsonl", [{**swap, "error": None}, {**swap, "error": "no"}])
    restart = {"actor": "actor-0", "at": 10.0, "reason": "killed"}
    append_rows(tmp_path / "restarts.jsonl", [restart])
    back = {"process": "actor-0", "at": 15.0, "seconds": 5.0}
    append_rows(tmp_path / "recoveries.jsonl", [back])
    asked = {"at": 16.0, "before": 1, "asked": 3, "refused": None}
    append_rows(tmp_path / "scalings.jsonl", [asked, {**asked, "at": 17.0, "refused": "no room"}])
    (directory.checkpoints / "v000002").mkdir(parents=True)
    assert [text for _, text in events(directory)] == [
        "actor-0 was restarted: killed",
        "actor-0 is back after 5.0 s",
        "actors asked for: 1 → 3, done",
        "actors asked for: 1 → 3, refused: no room",
        "engine-0 did not take version 3: no",
        "checkpoint of version 2",
    ]


def test_only_the_end_of_a_long_file_is_read_for_events(tmp_path):
    directory = RunDirectory(tmp_path)
    rows = [{"actor": f"actor-{n}", "at": float(n), "reason": "x" * 100} for n in range(2000)]
    append_rows(directory.path / "restarts.jsonl", rows)
    assert [at for at, _ in events(directory)] == [float(n) for n in range(1992, 2000)]


def test_text_that_is_not_metrics_is_refused_by_its_source():
    with pytest.raises(InputError, match=r"10.0.0.1:9 shows no metrics in Prometheus' format"):
        parse("<html>\n", source="10.0.0.1:9")


def test_sessions_of_agents_are_shown_where_there_are_any():
    def agents(turns, lost, segments, model, agent):
        return scrape(
            tokens_generated_total=turns * 9, agent_turns_total=turns, agent_sessions=4,
            agent_segments_total=segments, agent_tokens_left_out_total__reason__undelivered=lost,
            agent_tokens_left_out_total__reason__interrupted=0,
            agent_seconds_total__waiting_for__model=model,
            agent_seconds_total__waiting_for__agent=agent,
        )  # fmt: skip

    before = moment(100.0, actor_0=agents(100, 10, 5, 10.0, 30.0))
    now = moment(110.0, actor_0=agents(200, 110, 25, 20.0, 60.0))
    interval = Interval(now, before)
    assert agent_waits(interval) == {"model": 0.25, "agent": 0.75}
    text = printed(screen(interval))
    assert "4 sessions · 10 turns/s · waiting for the model 25%, for agents 75%" in text
    assert "10.0% of the tokens left out (undelivered) · 20.0% of the turns began a further" in text
    assert "agents" not in printed(screen(Interval(moment(1.0, actor_0=actor(5)))))


if __name__ == "__main__":
    GOLDEN.write_text(frame())
