"""A real Prometheus finds a real run, and every expression that ships matches something."""

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.waiting import until

ROOT = Path(__file__).parents[3]
PLACES = f"{ROOT / '.prometheus' / 'usr' / 'bin'}:{os.environ['PATH']}"
PROMTOOL = shutil.which("promtool", path=PLACES)
PROMETHEUS = shutil.which("prometheus", path=PLACES)
SHIPPED = ROOT / "deploy" / "monitoring"
RULES = yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((SHIPPED / "grafana.json").read_text())["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None, reason="make test-prometheus fetches it"),
]


class Server:
    """A Prometheus that finds runs at one address."""

    def __init__(self, folder, targets):
        config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(SHIPPED / name) for name in config["rule_files"]]
        [discovery] = config["scrape_configs"][0]["http_sd_configs"]
        discovery |= {"url": targets, "refresh_interval": "1s"}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        command = [
            PROMETHEUS,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def ask(self, path, **parameters):
        question = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{question}", timeout=10) as said:
            return json.load(said)["data"]

    def query(self, expression):
        """Return what an expression matches; nothing while the server does not answer."""
        with suppress(urllib.error.URLError, ConnectionError):
            return self.ask("query", query=expression)["result"]
        return []


def found(file):
    return json.loads(file.read_text()) if file.exists() else []


@pytest.fixture(scope="module")
def watched(headway, tmp_path_factory):
    """Provide a run that goes on after some batches, and a Prometheus that watches it."""
    settings = ("name=watched", "sft.name=small", "steps=3000", "heldout.every=1000")
    process = headway.start("run", *settings)
    folder = tmp_path_factory.mktemp("prometheus")
    file = headway.folder / "runs" / "watched" / "targets.json"
    server = None
    try:
        until(lambda: process.poll() is not None or len(found(file)) == 5, 180)
        assert process.poll() is None, process.communicate()[0]
        [driver] = found(file)[0]["targets"]
        server = Server(folder, f"http://{driver}/targets")
        for expression in (
            "headway_version > 10", "headway_heldout_score",
            "rate(headway_tokens_trained_total[10s])",
        ):  # fmt: skip
            until(partial(server.query, expression), 180)
        yield process, server
    finally:
        process.terminate()
        process.wait(60)
        if server is not None:
            server.process.terminate()
            server.process.wait(30)
    assert not file.exists()


@pytest.fixture
def prometheus(watched):
    return watched[1]


@pytest.mark.parametrize(("check", "file"), [("config", "prometheus.yml"), ("rules", "rules.yml")])
def test_prometheus_own_tool_finds_nothing_wrong(check, file):
    found = subprocess.run(
        [PROMTOOL, "check", check, SHIPPED / file], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "FAILED" not in found.stdout + found.stderr


def test_every_process_of_the_run_is_found_and_answers(prometheus):
    found = {
        row["metric"]["process"]: (row["metric"]["role"], row["value"][1])
        for row in prometheus.query('up{run="watched"}')
    }
    assert found == {
        "driver": ("driver", "1"),
        "broker": ("broker", "1"),
        "broadcaster": ("broadcaster", "1"),
        "learner": ("learner", "1"),
        "actor-0": ("actor", "1"),
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_of_the_dashboard_matches(prometheus, expression):
    asked = expression.replace("$run", "watched").replace("$__rate_interval", "10s")
    until(lambda: prometheus.query(asked), 20)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_speaks_of_metrics_that_are_there(prometheus, rule):
    """What an alert compares is found; whether it fires depends on the run."""
    expression = rule["expr"].replace("[10m]", "[10s]")
    for part in expression.split(" or "):
        compared = part.split(" and ")[0].split(" unless ")[0]
        for sign in (" > ", " < ", " == ", " != "):
            if sign in compared:
                left, right = compared.split(sign)
                assert prometheus.query(left), left
                name = right.split()[-1]
                assert name[0].isdigit() or prometheus.query(name), name
                break
        else:
            raise AssertionError(f"{part} compares nothing")


def test_a_healthy_run_fires_no_alert_but_for_its_disk(prometheus):
    until(lambda: {rule["health"] for rule in _rules(prometheus)} == {"ok"}, 30)
    firing = {rule["name"] for rule in _rules(prometheus) if rule["state"] == "firing"}
    assert firing <= {"HeadwayDiskFull"}


def _rules(prometheus):
    return prometheus.ask("rules")["groups"][0]["rules"]


def test_a_run_that_has_ended_is_no_process_down(watched):
    """The last test here: Prometheus still has its targets, and none answers."""
    process, prometheus = watched
    [rule] = [rule for rule in RULES if rule["alert"] == "HeadwayProcessDown"]
    process.terminate()
    process.wait(60)
    answers = partial(prometheus.query, 'up{run="watched"} == 1')
    silent = partial(prometheus.query, 'up{run="watched"} == 0')
    until(lambda: silent() and not answers())
    assert prometheus.query(rule["expr"]) == []
