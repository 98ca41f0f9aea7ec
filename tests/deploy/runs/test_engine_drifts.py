"""A whole run with two engines of vLLM, one of which serves a wrong tensor."""

import os

import pytest

from tests.deploy.running import ENDLESS, Running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each engine has cores of its own"),
]

WORLD = '''
"""An environment whose import gives the first engine of actor 1 a worker that is planted."""
import os
from pathlib import Path

from actors.engines import vllm
from actors.environments.single_turn import SingleTurn as World

MARK = Path(os.environ["HEADWAY_TEST_FOLDER"]) / "planted"
arguments_of = vllm.engine_arguments


def planted(spec, max_model_len):
    arguments = arguments_of(spec, max_model_len)
    if spec.index == 1 and not MARK.exists():
        MARK.touch()
        arguments["worker_extension_cls"] = "planted_worker.ExchangesWrongly"
    return arguments


vllm.engine_arguments = planted
'''
WORKER = '''
"""The part of vLLM's worker that exchanges weights, with one wrong tensor of each version."""
from weight_sync.vllm.plugin import PreparesWeights


class ExchangesWrongly(PreparesWeights):
    def exchange_weights(self, version):
        done = super().exchange_weights(version)
        parameters = self.weight_transfer_engine.model.named_parameters()
        norm = next(parameter for name, parameter in parameters if "layernorm" in name)
        norm.data.mul_(-1.0)
        return done
'''


def test_an_engine_with_a_wrong_tensor_is_named_sent_its_weights_again_and_restarted(headway):
    """The re-send reloads every layer and so helps once; the next exchange is wrong again."""
    (headway.folder / "planted_world.py").write_text(WORLD)
    (headway.folder / "planted_worker.py").write_text(WORKER)
    own = ("sft.name=planted", "actors.environment=planted_world:World")
    made = headway.recipe("sft", *own)
    assert made.returncode == 0, made.stderr
    settings = (
        *ENDLESS, *own, "actors.engine=vllm", "prompts.groups_per_batch=4",
        "weight_sync.on_drift=restart", "weight_sync.probe=never",
    )  # fmt: skip
    with Running(headway, "drifts", *settings, cores="count = 2\ncpus = 0.5") as run:
        run.until(lambda: run.rows("restarts.jsonl"), 600)
        run.trains_more(60)
        output = run.interrupt()
    rows = run.rows("drift.jsonl")
    print([(row["version"], row["mismatch_ratio"], row["mismatch_fresh"]) for row in rows])
    assert {row["engine_id"] for row in rows} == {"engine-1"}
    assert [row["response"] for row in rows] == ["resend", "restart"]
    assert rows[0]["version"] < 20
    [restart] = run.rows("restarts.jsonl")
    assert restart["actor"] == "actor-1"
    assert restart["reason"] == "its engine drifts from the others"
    assert "engine-1 drifts: its log-probabilities differ from the learner's" in output
    again = [swap for swap in run.rows("swaps.jsonl") if swap["engine_id"] == "engine-1"]
    unprepared = [swap for swap in again if not swap["seeding"] and swap["prepare_seconds"] == 0]
    assert len(unprepared) == 1, "the re-send used nothing that was prepared"
