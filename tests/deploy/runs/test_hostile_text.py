"""A run with hostile text from prompts, environment and reward: rollouts fail, the run does not."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(400)]

MODULE = r'''
import json
from actors.environments.protocol import Message, Turn
from queues.records import Prompt

class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")
    __str__ = __repr__

class Source:
    """Every fifth prompt is fine, or has trouble of one kind."""
    def __init__(self, *, options, seed, split="train", heldout_size=0):
        self.position, self.split = 0, split
    def next(self, count):
        prompts = []
        for _ in range(count):
            kind = ("fine", "prompt", "reply", "raise", "reward")[
                self.position % 5 if self.split == "train" else 0]
            text = f"{self.position}+1=" + ("\ud800" if kind == "prompt" else "")
            prompts.append(Prompt(prompt_id=f"{self.split}/0/{self.position}", text=text,
                                  answer="7", metadata={"kind": kind}))
            self.position += 1
        return prompts
    def cursor(self):
        return json.dumps(self.position)
    def restore(self, cursor):
        self.position = json.loads(cursor)

class Environment:
    def reset(self, prompt):
        self.kind = prompt.metadata.get("kind")  # demonstrations have none
        return [Message("user", prompt.text)]
    def step(self, message):
        if self.kind == "raise":
            raise Unspeakable
        text = "a\udfffb" if self.kind == "reply" else "7"
        return Turn([Message("user", text)], 0.5, done=self.kind != "reply")

def score(prompt, completion, answer, metadata):
    if metadata["kind"] == "reward":
        print("x" * 10_000_000)
        raise ValueError("\ud800" * 1_000_000)
    return float(len(completion))
'''
SETTINGS = (
    "name=hostile", "sft.name=hostile", "steps=4", "prompts.source=hostile_text:Source",
    "actors.environment=hostile_text:Environment", "actors.reward=['hostile_text:score']",
    "queues.max_attempts=1", "queues.retry_seconds=0", "deploy.max_failed_groups=1000",
    "actors.scripted_options={median_length = 8, length_sigma = 0.3}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(headway):
    (headway.folder / "hostile_text.py").write_text(MODULE)
    made = headway.recipe("sft", *SETTINGS)
    assert made.returncode == 0, made.stderr
    return headway.recipe("run", *SETTINGS)


def test_it_trains_to_its_end_and_the_accounts_name_what_failed(headway, run):
    assert run.returncode == 0, run.stderr
    accounts = headway.accounting("hostile")
    assert accounts["balanced"]
    assert accounts["trained"] == 8
    assert set(accounts["failed"]) == {"prompt", "environment", "reward"}
    failed = {prompt["prompt_id"]: prompt["error"] for prompt in accounts["failed_prompts"]}
    assert all(f"prompt '{prompt}'" in error for prompt, error in failed.items())
    kinds = {int(prompt.rpartition("/")[2]) % 5: error for prompt, error in failed.items()}
    assert "lone surrogate, U+D800" in kinds[1]
    assert "lone surrogate, U+DFFF" in kinds[2]
    assert "Unspeakable whose repr fails" in kinds[3]
    assert "raised ValueError(" in kinds[4]


def test_its_logs_and_its_ledger_stay_small(headway, run):
    folder = headway.folder / "runs" / "hostile"
    assert sum(path.stat().st_size for path in folder.rglob("*.err")) < 2**20
    assert (folder / "ledger.sqlite").stat().st_size < 2**20


def test_failed_prompts_of_a_run_that_has_trained_all_are_not_queued(headway, run):
    refused = headway.call("requeue", "hostile")
    assert refused.returncode == 2
    assert "has trained all of its 4 batches" in refused.stderr
