"""How many series all processes of a run with a real engine and 64 simulated actors show."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from actors.metrics import ENGINE
from deploy.observability.top_model import parse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.deepspeed,
    pytest.mark.timeout(480),
]

ACTORS = 65
PER_ACTOR, BESIDES = 36, 400
PROGRAM = Path(__file__).parents[1] / "crowded_run.py"


def ask(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return parse(answer.read().decode(), source=address)


def found(file):
    return json.loads(file.read_text()) if file.exists() else []


@pytest.fixture(scope="module")
def samples(headway):
    """Return every process's samples, by name, once every engine has had a weight update."""
    settings = ("name=crowded", "sft.name=small", "steps=100000", "heldout.every=100000")
    engine = ("actors.engine=vllm", "deploy.engine_metrics=true")
    command = headway.arguments("run", *settings, *engine)[1:]
    targets = headway.folder / "runs" / "crowded" / "targets.json"
    with (headway.folder / "crowded.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, *command],
            cwd=headway.folder, env=headway.environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert process.poll() is None, Path(log.name).read_text()
            time.sleep(0.5)
            where = {each["labels"]["process"]: each["targets"][0] for each in found(targets)}
            if len(where) < ACTORS + 4:
                continue
            said = {name: ask(address) for name, address in where.items()}
            updated = [s for s in said["driver"] if s.name == "headway_weight_updates_total"]
            [version] = [s for s in said["broker"] if s.name == "headway_version"]
            if len(updated) == ACTORS and version.value > 3:
                break
        else:
            raise AssertionError(f"not within the deadline: {Path(log.name).read_text()}")
        yield said
    finally:
        process.terminate()
        process.wait(60)


def owner(process, labels):
    """Return the actor of a series, whichever process exports it; None: one series a run."""
    if process.startswith("actor-"):
        return process
    values = [value.replace("engine-", "actor-") for value in labels.values()]
    return next((value for value in values if value.startswith("actor-")), None)


def test_series_are_few_for_each_actor_and_for_the_rest(samples):
    counts = Counter(
        owner(process, sample.labels) for process, said in samples.items() for sample in said
    )
    besides = counts.pop(None)
    print(f"{max(counts.values())} series for an actor at most, {besides} besides")
    assert len(counts) == ACTORS
    assert max(counts.values()) <= PER_ACTOR
    assert besides <= BESIDES


def test_of_vllms_own_those_that_are_allowed_are_shown_without_its_labels(samples):
    shown = {
        process: [sample for sample in said if sample.name.startswith("vllm:")]
        for process, said in samples.items()
    }
    of_actor = shown.pop("actor-0")
    assert {sample.name.removesuffix("_total") for sample in of_actor} == set(ENGINE)
    assert not any(sample.labels for sample in of_actor)
    assert not any(shown.values())
