"""A pipeline that is interrupted within every stage and within scoring, ends as one that is not."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.folder_checksums import compute, files_of
from tests.deploy.conftest import HEADWAY, RECIPE, REWARD, Headway, read_rows
from tests.waiting import until

WAIT_SECONDS = 600.0
STAGES = {"warm": "sft", "liked": "prefer", "marks": "reward-model", "policy": "run"}
ROAD = """
name = "{name}"
[set]
steps = 6
actors.reward = ["varied:score"]
[set.sft]
steps = 40
checkpoint_every = 4
[set.prefer]
pairs = "lettered_chain_sum"
steps = 24
batch_pairs = 4
heldout_pairs = 8
checkpoint_every = 4
[set.reward_model]
pairs = "lettered_chain_sum"
steps = 12
batch_pairs = 4
heldout_pairs = 16
members = 2
[scores]
recipe = "{recipe}"
samples = 2
""" + "".join(
    f'[[stages]]\nname = "{name}"\ncommand = "{command}"\nrecipe = "{{recipe}}"\n'
    for name, command in STAGES.items()
)


@dataclass(frozen=True)
class Road:
    """The pipeline under a name of its own."""

    headway: Headway
    name: str

    @property
    def folder(self):
        return self.headway.run_folder(self.name)

    @property
    def outputs(self):
        """The folders of what its stages make."""
        return {
            "warm": self.folder / "small-sft/model",
            "liked": self.folder / f"{self.name}-prefer/model",
            "marks": self.folder / f"{self.name}-rm",
            "policy": self.folder / "policy-model",
        }

    def record(self, stage):
        file = self.folder / ".stages" / f"{stage}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def until(self, moment=None, how=signal.SIGKILL, flags=()):
        """Begin or go on, until a `moment` of what it prints; return exit code and output."""
        file = self.headway.folder / f"{self.name}.out"
        with file.open("w") as output:
            process = subprocess.Popen(
                [HEADWAY, "pipeline", f"{self.name}.toml", *flags], cwd=self.headway.folder,
                env=self.headway.environment, start_new_session=True, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            if moment is not None:
                until(lambda: moment(self), WAIT_SECONDS, process=process, output=file.read_text)
                os.killpg(process.pid, how)
            code = process.wait(WAIT_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
        return code, file.read_text()

    def prints(self, text):
        return text in (self.headway.folder / f"{self.name}.out").read_text()


@pytest.fixture(scope="module")
def new_road(tmp_path_factory):
    headway = Headway(tmp_path_factory.mktemp("pipelines"))
    (headway.folder / "varied.py").write_text(REWARD)

    def new_road(name):
        (headway.folder / f"{name}.toml").write_text(ROAD.format(name=name, recipe=RECIPE))
        return Road(headway, name)

    return new_road


@pytest.fixture(scope="module")
def uninterrupted(new_road):
    road = new_road("whole")
    code, output = road.until()
    assert code == 0, output
    return road


def has(path):
    return lambda road: (road.folder / path.format(name=road.name)).exists()


MOMENTS = {
    "warm": has("small-sft/unfinished/v000004/checksums.json"),
    "scoring of warm": lambda road: road.prints("small-sft/model plays heldout"),
    "liked": has("{name}-prefer/unfinished/v000004/checksums.json"),
    "marks": has(".{name}-rm.partial/model-0/config.json"),
    "policy": lambda road: len(read_rows(road.folder / "policy/metrics.jsonl")) >= 3,
    "scoring of policy": lambda road: road.prints("policy-model plays heldout"),
}
GOES_ON = {"warm": "sft: 40 steps, from step ", "liked": "prefer: 24 steps, from step "}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_pipeline_interrupted_everywhere_ends_as_one_that_was_not(new_road, uninterrupted, how):
    road, before, expected = new_road(how.name.lower()), {}, "stage 1 of 4"
    for name, moment in MOMENTS.items():
        code, output = road.until(moment, how)
        assert code == (130 if how == signal.SIGINT else -signal.SIGKILL), output
        assert expected in output
        if how == signal.SIGINT:
            again = f"go on with: headway pipeline {road.name}.toml\n"
            assert output.endswith(f"stopped by the user\n{again}")
            assert output.count("go on with") == 1
        expected = GOES_ON.get(name, "is done")
        made = {stage: inodes(path) for stage, path in road.outputs.items() if road.record(stage)}
        assert made | before == made, "what is done is not done again"
        before = made
        if name == "policy":
            saved = read_rows(road.folder / "policy/metrics.jsonl")[:2]
    assert [*before] == [*STAGES]
    rows = read_rows(road.folder / "policy/metrics.jsonl")
    code, output = road.until()
    assert code == 0, output
    assert output.count(": is done") == 4
    assert "go on with" not in output
    assert {stage: inodes(path) for stage, path in road.outputs.items()} == before
    assert ([row["version"] for row in rows], rows[:2]) == (list(range(6)), saved)
    for stage in STAGES:
        scores = [(it.record(stage)["scores"] or {}).get("sets") for it in (road, uninterrupted)]
        assert scores[0] == scores[1]
        if stage != "policy":  # which depends on time
            assert weights(road.outputs[stage]) == weights(uninterrupted.outputs[stage])


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_stage_begun_anew_goes_on_from_its_checkpoint(new_road):
    road, warm = new_road("again"), '[[stages]]\nname = "warm"\ncommand = "sft"\n'
    text = ROAD.format(name="again", recipe=RECIPE).partition("[scores]")[0]
    (road.headway.folder / "again.toml").write_text(f'{text}{warm}recipe = "{RECIPE}"\n')
    assert road.until()[0] == 0
    before = weights(road.outputs["warm"])
    road.until(MOMENTS["warm"], flags=["--redo", "warm"])
    assert weights(road.outputs["warm"]) == before, "it is there until there is another"
    inode = road.outputs["warm"].stat().st_ino
    code, output = road.until()
    assert (code, GOES_ON["warm"] in output) == (0, True), output
    assert road.outputs["warm"].stat().st_ino != inode
    assert weights(road.outputs["warm"]) == before


def inodes(folder: Path):
    return {str(file): file.stat().st_ino for file in sorted(folder.rglob("*"))}


def weights(folder: Path):
    return compute(folder, [name for name in files_of(folder) if name.endswith(".safetensors")])
