"""A whole run whose actors are killed in the middle of conversations of several turns."""

import pytest

from queues.readers.recorded_batches import read_batch
from queues.schema import decode
from queues.turns import decode_turn
from tests.deploy.running import ACTOR, Running

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1200)]
TWO = "count = 2\ncpus = 0.5"
STEPS = 80
TALK = """
import asyncio

from actors.environments.protocol import Message, Turn


class Talk:
    async def reset(self, prompt):
        self.left = 4
        return [Message("user", prompt.text)]

    async def step(self, message):
        await asyncio.sleep(0.25)
        self.left -= 1
        return Turn([Message("user", f"{self.left}+1=")], 0.0, done=self.left == 0)
"""
NOTED = (
    "SELECT group_id, sample_index, payload, attempt FROM notes JOIN groups USING (group_id)"
    " WHERE name GLOB 'turn/*'"
)


def test_every_turn_that_was_noted_when_an_actor_was_killed_is_trained_as_it_was(headway):
    (headway.folder / "talk.py").write_text(TALK)
    made = ("sft.name=talks", "actors.environment=talk:Talk")
    warm = headway.recipe("sft", *made)
    assert warm.returncode == 0, warm.stderr
    settings = (
        *made, f"steps={STEPS}", f"heldout.every={STEPS}",
        "actors.scripted_options={tokens_per_second=40.0, median_length=6}",
    )  # fmt: skip
    noted = []
    with Running(headway, "talks", *settings, cores=TWO) as run:
        run.trains(2)
        for restart in (1, 2):
            run.until(lambda: run.titled(ACTOR)[1:])
            run.until(lambda: len(run.query(NOTED)) >= 4)
            run.titled(ACTOR)[0].kill()
            noted += run.query(NOTED)
            run.until(lambda count=restart: run.serves_again(count))
        assert run.check(STEPS, actors=2) == 0
    payloads = [payload for version in range(STEPS) for payload in read_batch(run.folder, version)]
    trained = {group.group_id: group for group in map(decode, payloads)}
    redelivered = 0
    for group_id, index, payload, attempt in noted:
        turn, group = decode_turn(payload), trained[group_id]
        rollout = next(r for r in group.rollouts if r.sample_index == index)
        began = turn.shared + len(turn.injected)
        own = slice(began, began + len(turn.token_ids))
        assert [*rollout.token_ids[turn.shared : began]] == turn.injected
        assert [*rollout.token_ids[own]] == turn.token_ids
        assert [*rollout.versions[own]] == turn.versions
        assert [*rollout.behavior_logprobs[own]] == turn.behavior_logprobs
        redelivered += group.attempt > attempt
    print(f"{len(noted)} turns were noted, {redelivered} of groups that were leased again")
    assert redelivered > 0
    assert run.query(NOTED) == []
