"""Names and texts from outside where people see them: shown as written, acting on nothing."""

import base64
import io
import json
import logging
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.cluster.worker_logs import collect_worker_logs
from deploy.config.loader import load_recipe
from deploy.observability.samples import Sample, heading, text_of
from deploy.report.plots import PlottedRun
from deploy.report.report import page
from deploy.report.tables import show_failed, show_runs
from deploy.runtime.console import Terminal, log_to
from deploy.runtime.safe_console import SafeConsole, echo
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from headway.errors import InputError
from learner.metrics import LearnerMetrics
from queues.readers.accounting import FailedPrompt
from queues.readers.selection_bias import compare
from tests.deploy.report.test_report import batch

NAMES = {
    "escape codes": "\x1b[2J\x1b]0;owned\x07",
    "carriage return": "done\rnot done",
    "backspaces": "rm\x08\x08ls",
    "rich markup": "[red]a[/red][/][link=http://x]b[/link]",
    "an end without a beginning": "a[/bold]\\[b]",
    "emoji": ":smile: :warning:",
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;",
    "the end of an image": "\"/></svg><script>",
    "formula": "$\\frac{1}{$ $x^2$ $",
    "right to left": "\u202edlrow\u202c",
    "invisible": "a\u200b\u2060\ufeffb",
    "line separators": "a\u2028b\u2029c\x0b\x0c\x85d",
    "a forged line": "x\n2026-01-01 00:00:00,000 ERROR forged",
    "NUL": "a\0b",
    "lone surrogate": "a\ud800b",
    "control of C1": "a\x9b2Jb",
    "deletion": "a\x7fb",
    "format": "%s %(message)s {0} {name}",
    "quotes": "a\"b'c`d\\",
    "long": "x" * 100_000,
}  # fmt: skip


def is_plain(text):
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.fixture(params=NAMES)
def name(request, outcomes):
    yield NAMES[request.param]
    outcomes["printed", f"{request.node.originalname}, {request.param}"] = "plain"


def printed(act):
    file = io.StringIO()
    act(SafeConsole(file=file, width=200))
    return file.getvalue()


def test_a_line_on_the_terminal(name):
    text = printed(lambda console: Terminal(console).say(f"loads {name}"))
    assert is_plain(text)
    if is_plain(name) and "\n" not in name:
        assert name in text


def test_the_log_of_the_driver(name, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest-xdist cannot send surrogates
    with pytest.raises(OSError), log_to(tmp_path / "driver.log"):  # noqa: PT011, PT012
        Terminal(SafeConsole(file=io.StringIO())).say(f"loads {name}")
        logging.getLogger("elsewhere").warning("of %s", name)
        raise OSError(name)
    text = (tmp_path / "driver.log").read_text()
    assert is_plain(text)
    assert not re.search("^2026-01-01", text, re.MULTILINE)


def test_progress_of_a_terminal(name):
    file = io.StringIO()
    terminal = Terminal(SafeConsole(file=file, width=200, force_terminal=True))
    with terminal.bar(2, name):
        terminal.advance(1, name)
    shown = file.getvalue()
    assert not any(code in shown for code in ("\x1b[2J", "\x07", "\x08", "\0", "\x9b", "\u202e"))


def test_tables_of_failed_prompts(name):
    prompts = [FailedPrompt(name, "g", "train", 1, "reward", f"{name}\n{name}")]
    assert is_plain(printed(lambda console: show_failed(prompts, console)))


def test_the_list_of_runs(name, tmp_path):
    folder = tmp_path / re.sub(r"[/\0\ud800]", "", name)[:50]
    folder.mkdir()
    (folder / "recipe.toml").write_text("")
    (folder / "summary.json").write_text(json.dumps({"status": name}))
    run = RunDirectory(folder)
    assert is_plain(printed(lambda console: show_runs([run], console)))


def test_rollouts_as_text(name):
    sample = Sample(
        version=1, group_id="g1", prompt_id=name, sample_index=0,
        reward=1.0, reward_parts={name: 1.0, "b": 2.0},
        tokens=1, lag=0, finish_reason=name, prompt=name, response=name,
    )  # fmt: skip
    assert "\n" not in heading(sample)
    assert is_plain(heading(sample) + text_of(sample))


def test_a_command_that_echoes(name, capsys):
    echo(f"from the cluster: {name}")
    assert is_plain(capsys.readouterr().out)


def test_the_page_of_a_report(outcomes):
    parts = [name[:200].replace("\ud800", "") for name in NAMES.values()]
    rows = [batch(n, reward_parts=dict.fromkeys(parts, 0.5)) for n in range(2)]
    runs = [
        PlottedRun(
            name, Record(name, 3, 2, started_at=0.0, batches=rows), compare([]), "#1f6fb4",
            {name: name}, {"model": name}, [name],
        )
        for name in parts[:2]
    ]  # fmt: skip
    text = page("".join(NAMES.values()), runs, None)
    assert is_plain(text)
    assert "<script" not in text
    assert "<img src=x" not in text
    images = re.findall(r"base64,([A-Za-z0-9+/=]+)", text)
    for image in images:
        root = ElementTree.fromstring(base64.b64decode(image).decode())
        assert not [e for e in root.iter() if e.tag.endswith(("script", "image"))]
    outcomes["printed", "the page of a report, all names"] = "plain"
    assert len(images) > 5


def test_labels_of_metrics(name):
    metrics = LearnerMetrics()
    metrics.observe(batch(0, reward_parts={name: 0.5}))
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    assert is_plain(text)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    [sample] = families["headway_reward_part"].samples
    assert sample.value == 0.5


def test_output_of_workers(name, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    content = f":actor_name:actor-0\n{name}\n".encode(errors="surrogatepass")
    (tmp_path / "worker-1-ffffffff-7.err").write_bytes(content)
    collect_worker_logs(tmp_path, logs)
    assert is_plain((logs / "actor-0.err").read_text())


def test_errors_of_a_command(outcomes):
    program = (
        "import json, sys\nfrom deploy.cli.app import _print_error\n"
        "from deploy.runtime.safe_console import print_uncaught\n"
        "for text in json.loads(sys.argv[1]):\n"
        "    _print_error(text)\n"
        "    print_uncaught(SystemError, SystemError(text), None)\n"
    )
    names = json.dumps([name[:1000] for name in NAMES.values()])
    done = subprocess.run(
        [sys.executable, "-c", program, names], capture_output=True, timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert is_plain(done.stderr.decode())
    assert done.stderr.count(b"headway: ") == done.stderr.count(b"SystemError: ") == len(NAMES)
    outcomes["printed", "errors of a command, all names"] = "plain"


SECRETS = {
    "learner.loss_options.key": "key-3f1c0b7d9a",
    "model.path": "https://me:hunter2hunter@hub/model",
    "actors.reward_options.mine.url": "http://h/?k=key-3f1c0b7d9a",
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_recipe_with_a_secret_is_refused_by_its_key(outcomes, monkeypatch, key):
    monkeypatch.setenv("SOME_API_KEY", "key-3f1c0b7d9a")
    from headway.clean_text import register

    register([])
    with pytest.raises(InputError) as caught:
        load_recipe("demo", [f"{key}={SECRETS[key]}"])
    outcomes["recipe", key] = "refused"
    assert f"{key} = " in str(caught.value)
    assert "3f1c0b7d9a" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
