"""A real Prometheus finds a real run, and every expression that ships matches something."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

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
        return self.ask("query", query=expression)["result"]


def wait_for(what, deadline=180):
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            if answer := what():
                return answer
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"not within {deadline} s")


def found(file):
    return json.loads(file.read_text()) if file.exists() else []


@pytest.fixture(scope="module")
def watched(headway, tmp_path_factory):
    """Of a run that has trained some batches, and goes on."""
    settings = ("name=watched", "sft.name=small", "steps=3000", "heldout.every=1000")
    process = headway.start("run", *settings)
    folder = tmp_path_factory.mktemp("prometheus")
    file = headway.folder / "runs" / "watched" / "targets.json"
    server = None
    try:
        wait_for(lambda: process.poll() is not None or len(found(file)) == 5)
        assert process.poll() is None, process.communicate()[0]
        [driver] = found(file)[0]["targets"]
        server = Server(folder, f"http://{driver}/targets")
        wait_for(lambda: server.query("headway_version > 10"))
        wait_for(lambda: server.query("headway_heldout_score"))
        wait_for(lambda: server.query("rate(headway_tokens_trained_total[10s])"))
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
    assert wait_for(lambda: prometheus.query(asked), deadline=20)


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
    wait_for(lambda: {rule["health"] for rule in _rules(prometheus)} == {"ok"}, deadline=30)
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
    wait_for(lambda: not prometheus.query('up{run="watched"} == 1'), deadline=60)
    assert prometheus.query('up{run="watched"} == 0')
    assert prometheus.query(rule["expr"]) == []
