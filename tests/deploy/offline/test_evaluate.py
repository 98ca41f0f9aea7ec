"""`headway eval`: the scores of each set, what fails, versions of runs, and refusals."""

import json

import pytest

from actors.errors import RewardFailed
from actors.rollout.episode import EpisodeRunner
from queues.readers.checkpoints import read_progress
from tests.deploy.conftest import RECIPE, REWARD, call_main

MORE = 'heldout.sets={ more = { source = "lettered_chain_sum", size = 3 } }'


@pytest.fixture
def evaluate(tmp_path, tiny_model):
    """Return a function that evaluates the tiny model."""
    (tmp_path / "varied.py").write_text(REWARD)

    def call(*arguments, code=0):
        unmade = ["--set", "prefer.pairs=lettered_chain_sum"]  # what the policy is not made by
        fixed = ["--suite", RECIPE, *unmade, "--set", "actors.heldout_reward=['varied:score']"]
        result = call_main(["eval", tiny_model, *fixed, *arguments], tmp_path)
        assert result.returncode == code, result.stdout + result.stderr
        call.errors = result.stderr
        return json.loads(result.stdout) if "--json" in arguments and not code else result.stdout

    return call


def test_every_set_is_scored_over_its_problems_by_the_rewards_of_the_recipe(evaluate, tmp_path):
    options = ("--samples", "5", "--best-of", "varied:score", "--set", "prompts.pass_threshold=0.5")
    document = evaluate("--set", MORE, *options, "--json")
    (file,) = (tmp_path / "runs/evaluations").iterdir()
    assert json.loads(file.read_text()) == document
    assert {name: scores["reward"]["n"] for name, scores in document["sets"].items()} == {
        "heldout": 6, "more": 3,
    }  # fmt: skip
    scores = document["sets"]["heldout"]
    assert [*scores] == [
        "reward", "correct", "pass@1", "best@1", "pass@2", "best@2", "pass@4", "best@4", "pass@5",
        "best@5",
    ]  # fmt: skip
    value = {label: score["value"] for label, score in scores.items()}
    assert value["best@1"] == pytest.approx(value["reward"])
    assert value["pass@1"] == pytest.approx(value["correct"])
    assert value["reward"] < value["best@2"] < value["best@5"]
    assert all(score["low"] <= score["value"] <= score["high"] for score in scores.values())


def test_another_policy_is_played_too_and_compared_by_rewards(evaluate, tiny_model):
    document = evaluate("--against", tiny_model, "--json")
    assert [policy["name"] for policy in document["policies"]] == [str(tiny_model)] * 2
    score = document["sets"]["heldout"]["win_rate"]
    assert (score["n"], score["wins"] + score["ties"] + score["losses"]) == (6, 6)
    assert "orders agree in 100%" in evaluate("--against", tiny_model)


def test_problems_that_fail_are_left_out_and_named(evaluate, monkeypatch, tmp_path):
    play, doomed = EpisodeRunner.run, set()

    async def failing(self, lease, sample, saved=None):
        if not doomed:
            doomed.add(lease.prompt.prompt_id)
        if doomed & {lease.prompt.prompt_id, "all"}:
            raise RewardFailed("reward 'x' has no sandbox")
        return await play(self, lease, sample, saved)

    monkeypatch.setattr(EpisodeRunner, "run", failing)
    assert evaluate("--json")["sets"]["heldout"]["reward"]["n"] == 5
    text = "heldout: 1 of 6 problems failed, and are left out; the first: reward 'x' has no sandbox"
    assert text in evaluate.errors
    doomed.add("all")
    files = [*(tmp_path / "runs/evaluations").iterdir()]
    evaluate(code=1)
    assert "heldout: 6 of 6 problems failed; the first: reward 'x' has no san" in evaluate.errors
    assert [*(tmp_path / "runs/evaluations").iterdir()] == files


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--best-of", "tags"], "give --samples"),
        (["--samples", "2", "--best-of", "tgas"], "did you mean 'tags'?"),
        (["--samples", "2", "--best-of", "llm_judge"], "requires the option url"),
        (["--samples", "2", "--best-of", "reward_model"], "which does not exist yet"),
        (["--set", "heldout.judge={ model = 'm' }"], "heldout.judge requires the option url"),
        (["--against", "nothing"], "no run 'nothing'"),
        (["--set", "heldout.sets={ heldout = { source = 'files' } }"], "choose another"),
        (["--set", "heldout.sets={ a = { sauce = 'files' } }"], "heldout.sets.a"),
        (["--set", "heldout.sets={ a = { source = 'fils' } }"], "did you mean 'files'?"),
        (["--set", "heldout.sets={ a = 3 }"], "heldout.sets"),
        (
            ["--set", 'heldout.sets={ a = { source = "files", options = { path = "no" } } }'],
            "heldout.sets.a.source",
        ),
        (["--set", "deploy.runs_dir='file'"], "file/evaluations cannot be made"),
    ],
)
def test_bad_input_is_one_message_before_anything_is_written(evaluate, tmp_path, arguments, words):
    (tmp_path / "file").write_text("no folder")
    before = {*tmp_path.rglob("*")}
    evaluate(*arguments, code=2)
    assert words in evaluate.errors
    assert "Traceback" not in evaluate.errors
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= before


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_named_version_of_a_run_is_scored_whatever_it_has_trained_since(headway, finished):
    recorded = {c.version: c for c in read_progress(finished.folder).checkpoints}
    result = headway.call("eval", "small@2", "--json", "--against", "small@0")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["policies"][0] == {
        "name": "small@2", "version": 2, "checksum": recorded[2].weights_checksum,
    }  # fmt: skip
    assert document["policies"][1]["version"] == 0
    assert document["sets"]["heldout"]["win_rate"]["n"] == 6
    newest = headway.call("eval", "small", "--json")
    assert json.loads(newest.stdout)["policies"][0]["name"] == "small@6"
    missing = headway.call("eval", "small@3")
    assert missing.returncode == 2
    assert "no checkpoint of version 3; there are those of 2, 4, 6" in missing.stderr
