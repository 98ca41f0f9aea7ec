"""Hostile completions: nothing is executed, nothing fails but by its own score, nothing stays."""

from pathlib import Path

import pytest

from actors.errors import RewardFailed
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from actors.sandbox.sandbox import check_sandbox
from actors.sources.load_source import load_source
from queues.records import Prompt
from tests.red_team.cases import COMPLETIONS, MARK, SECRET


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "s3cret")
        pool = RewardPool(processes=2, verifier_seconds=0.5)
    yield pool
    pool.close()


def prompt_of(case):
    if case.task:
        [prompt] = load_source(f"reasoning_gym:{case.task}", options={}, seed=0).next(1)
        return prompt
    return Prompt(prompt_id="red/0/0", text="?", answer=case.answer, metadata=case.metadata)


async def outcome(case, pool):
    rewards = load_rewards(
        [case.reward], options={case.reward: case.options}, pool=pool, code_execution="sandbox"
    )
    try:
        total = (await rewards.score(prompt_of(case), case.text)).total
    except RewardFailed as error:
        return f"failed: {error}"
    return {0.0: "0", 1.0: "1"}.get(total, "part")


@pytest.fixture(scope="module", autouse=True)
def sandboxed():
    check_sandbox()
    Path(MARK).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case.kind == "slow" else [], id=case.id)
        for case in COMPLETIONS
    ],
)
async def test_a_hostile_completion_has_a_score_executes_nothing_and_leaves_nothing(
    outcomes, pool, case
):
    scored = await outcome(case, pool)
    outcomes[case.kind, case.id] = scored.partition(":")[0]
    assert scored in case.allowed
    assert not Path(MARK).exists()


TEXTS = sorted({x.text for x in COMPLETIONS if x.kind != "program" and len(x.text) < 60_000})


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:30]))
async def test_rewards_that_a_text_was_not_written_for_score_it_too(pool, text):
    [prompt] = load_source("reasoning_gym:countdown", options={}, seed=0).next(1)
    options = {"regex": {"pattern": "(a+)+@!"}, "json_schema": {"schema": {"type": "object"}}}
    names = ["reasoning_gym", "similarity", "tags", "math_verify", "last_answer", *options]
    rewards = load_rewards(names, options=options, pool=pool)
    parts = (await rewards.score(prompt, text)).parts
    assert parts["regex"] == 0.0
    assert parts["reasoning_gym"] < 0.5
    assert not Path(MARK).exists()


def test_every_case_has_a_name_of_its_own():
    assert len({case.id for case in COMPLETIONS}) == len(COMPLETIONS) >= 120
