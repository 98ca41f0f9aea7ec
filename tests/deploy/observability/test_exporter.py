"""The address that Prometheus asks, and what it is told."""

import asyncio
import errno
import json
import shutil
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy.config.loader import load_recipe
from deploy.driver.run_metrics import RunMetrics
from deploy.observability.exporter import DEFAULT_PORT, Exporter, check_address
from deploy.observability.waits import Wait
from deploy.preflight.inputs import load_inputs
from deploy.storage.run_record import Record
from headway.errors import InputError
from tests.deploy.run_rows import weight_update
from tests.waiting import reached, until

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
FAILURES, DISK = "headway_weight_update_failures", "headway_disk_free_bytes"


FAILED = weight_update(2, 11.0, staged=None, started=None, finished=None, error="LoadFailed: no")


def empty_record():
    return Record(name="mine", steps=3, max_staleness=2, started_at=0.0)


@pytest.fixture
def others():
    return [("broker", "10.0.0.1:9000")]


@pytest.fixture
def exporter(tmp_path, others):
    record = empty_record()
    done = weight_update(
        1, 10.0, staged=0.5, started=0.75, finished=2.0, bytes=100,
        prepare_seconds=0.125, pause_seconds=0.25, load_seconds=0.5, resume_seconds=0.25,
    )  # fmt: skip
    record.swaps += [done, FAILED]
    pinned = ("actors.count=2", 'actors.cores=["0", "0"]', "heldout.pinned=true")
    made = Exporter(
        load_recipe("demo", ["name=mine", *pinned]),
        tmp_path,
        RunMetrics(record, tmp_path, lambda: [Wait("a", "b", "c", seconds=7.0)]),
        lambda: others,
        node="10.0.0.7",
    )
    yield made
    made.close()


def ask(exporter, path):
    with urllib.request.urlopen(f"http://{exporter.address}{path}", timeout=10) as answer:
        return answer.read().decode()


def test_processes_are_found_with_their_labels_as_they_come_and_go(exporter, others, tmp_path):
    others += [("actor-0", "10.0.0.2:9001"), ("actor-1", "10.0.0.2:9002")]
    driver = {"run": "mine", "process": "driver", "role": "driver", "node": "10.0.0.7"}
    broker = {"process": "broker", "role": "broker", "node": "10.0.0.1"}
    evaluator = {"process": "actor-0", "role": "actor", "node": "10.0.0.2", "purpose": "evaluate"}
    actor = {"process": "actor-1", "role": "actor", "node": "10.0.0.2"}
    expected = [
        {"targets": [exporter.address], "labels": driver},
        {"targets": ["10.0.0.1:9000"], "labels": driver | broker},
        {"targets": ["10.0.0.2:9001"], "labels": driver | evaluator},
        {"targets": ["10.0.0.2:9002"], "labels": driver | actor},
    ]
    assert json.loads(ask(exporter, "/targets")) == expected
    exporter.write()
    assert json.loads((tmp_path / "targets.json").read_text()) == expected
    others.clear()
    exporter.write()
    assert json.loads((tmp_path / "targets.json").read_text()) == expected[:1]


def test_weight_updates_are_summed_by_phase_once_however_often_they_are_asked_for(exporter):
    ask(exporter, "/metrics")
    lines = ask(exporter, "/metrics").splitlines()
    phases = {"stage": 0.5, "prepare": 0.125, "permit": 0.125, "pause": 1.0, "serve": 2.0}
    for phase, seconds in phases.items():
        labels = f'{{engine="engine-0",phase="{phase}"}}'
        assert f"headway_weight_update_seconds_total{labels} {seconds}" in lines
    assert 'headway_weight_updates_total{engine="engine-0"} 1.0' in lines
    assert 'headway_weight_update_failures_total{engine="engine-0"} 1.0' in lines
    assert 'headway_weight_update_bytes_total{engine="engine-0"} 100.0' in lines


class Slow(list):
    """Reports that a scrape reads slowly."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return (time.sleep(0.05) or row for row in found)


def test_two_scrapes_at_once_count_an_update_once(tmp_path):
    record = empty_record()
    record.swaps = Slow([FAILED] * 4)
    metrics = RunMetrics(record, tmp_path, list)
    both = threading.Barrier(2)

    def scrape(_):
        both.wait(10)
        return list(metrics.collect())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(scrape, range(2)))
    record.swaps = []
    [failed] = [each for each in metrics.collect() if each.name == FAILURES]
    assert [sample.value for sample in failed.samples] == [4]


def test_restarts_and_lost_seconds_begin_at_0_for_every_process(tmp_path):
    record = empty_record()
    record.restarts["actor-0"], record.away["actor-0"] = 2, 1.5
    metrics = RunMetrics(record, tmp_path, list, processes=lambda: ["broker", "actor-0"])
    samples = {x.name: x.samples for x in metrics.collect()}
    for name, figure in (("headway_restarts", 2), ("headway_lost_seconds", 1.5)):
        figures = {x.labels["restarted"]: x.value for x in samples[name]}
        assert figures == {"broker": 0, "actor-0": figure}
    assert record.restarts == {"actor-0": 2}


def test_a_disk_that_hangs_leaves_its_metric_out_and_keeps_no_scrape(tmp_path, monkeypatch):
    hung = threading.Event()
    usage = shutil.disk_usage
    record = empty_record()
    metrics = RunMetrics(record, tmp_path, list, disk_seconds=0.05)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: hung.wait(30) and usage(path))
    for _ in range(2):
        assert DISK not in {family.name for family in metrics.collect()}
    hung.set()
    until(lambda: DISK in {family.name for family in metrics.collect()})


def test_waits_that_last_too_long_are_told_with_their_owner(exporter):
    lines = ask(exporter, "/metrics").splitlines()
    assert "headway_overdue_waits 1.0" in lines
    assert 'headway_overdue_wait_seconds{on="b",who="a"} 7.0' in lines


def test_the_file_is_there_from_the_beginning_follows_and_stays_away_when_all_is_closed(
    exporter, others, tmp_path
):
    file = tmp_path / "targets.json"

    async def processes(count):
        following = asyncio.create_task(exporter.follow())
        await reached(lambda: file.exists() and len(json.loads(file.read_text())) == count)
        following.cancel()

    asyncio.run(processes(2))
    others.append(("actor-0", "10.0.0.2:9001"))
    asyncio.run(processes(3))
    exporter.close()
    others.clear()
    exporter.write()
    assert not file.exists()


def test_a_disk_that_became_read_only_hides_no_other_failure_of_a_run(exporter, monkeypatch):
    read_only = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(Path, "unlink", read_only)
    exporter.close()
    read_only.assert_called_once()
    monkeypatch.undo()


def test_the_shipped_configuration_of_prometheus_looks_where_a_run_is_by_default():
    shipped = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [discovery] = shipped["scrape_configs"][0]["http_sd_configs"]
    deploy = load_recipe("demo").deploy
    assert deploy.metrics_port is None
    assert discovery["url"] == f"http://{deploy.metrics_host}:{DEFAULT_PORT}/targets"


def test_a_second_run_takes_a_free_port(tmp_path):
    def opened():
        return Exporter(load_recipe("demo"), tmp_path, CollectorRegistry(), list, node="")

    with ExitStack() as stack:
        exporters = [opened(), opened()]
        for made in exporters:
            stack.callback(made.close)
        ports = [int(made.address.rpartition(":")[2]) for made in exporters]
    assert ports[1] not in (ports[0], DEFAULT_PORT)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = [f"deploy.metrics_port={port}", f"deploy.runs_dir={tmp_path}"]
        with pytest.raises(InputError, match=f"metrics_port = {port}: Address already in use"):
            load_inputs(load_recipe("demo", settings))
    check_address("127.0.0.1", port)
