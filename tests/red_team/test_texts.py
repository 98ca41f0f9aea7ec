"""Texts that cannot be encoded: each fails its own rollout, which names the prompt."""

import asyncio
import sys
from pathlib import Path

import pytest

from actors.engines.protocol import SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.errors import RolloutFailed
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.chat_rendering import Renderer
from actors.rollout.rollout_worker import RolloutWorker
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.readers.accounting import failed_prompts
from queues.readers.open_run import open_ledger
from queues.records import Prompt
from tests.red_team.cases import TEXTS

sys.path.insert(0, str(Path(__file__).parents[1] / "actors"))

from fakes import Recited, episodes, lease

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=40)
CALL = '<tool_call>{"name": "speak", "arguments": {}}</tool_call>'


class AnyCharacter:
    """A tokenizer with a token for every character but lone surrogates, as real ones have."""

    chat_template = None
    unk_token_id = pad_token_id = None

    def encode(self, text, add_special_tokens):
        return [*text.encode()]

    def decode(self, ids, **_):
        return CALL


class Says:
    """An environment that answers with a text, in its reply or as an error."""

    def __init__(self, text, place):
        self._text, self._place = text, place

    def reset(self, prompt):
        return [Message("user", prompt.text)]

    def step(self, message):
        if self._place == "error":
            raise ValueError(self._text)
        return Turn([Message("user", self._text)], 0.0, done=False)


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: f"{case.place}-{case.name}")
def test_it_fails_its_rollout_and_names_the_prompt(case, monkeypatch):
    settings = {"new_environment": lambda: Says(case.text, case.place), "environment": "m:Says"}
    if case.place == "prompt":
        settings = {}
    elif case.place == "tool":
        monkeypatch.setattr("user_module.speak", lambda: case.text, raising=False)
        options = {"tools": ["user_module:speak"]}
        settings = {"environment": "tools", "options": options, "max_model_len": 5000}
    text = case.text if case.place == "prompt" else "3+4="
    runner = episodes(Recited("a", "b"), SAMPLING, renderer=Renderer(AnyCharacter()), **settings)
    with pytest.raises(RolloutFailed, match="prompt 'sums/0/1'") as caught:
        asyncio.run(runner.run(lease(text=text), 0))
    assert caught.value.reason == ("environment" if case.place == "error" else "prompt")
    assert case.place == "error" or "lone surrogate" in str(caught.value)


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


class ByPrompt:
    """An environment whose trouble is named in the metadata of the prompt."""

    def reset(self, prompt):
        self._kind = prompt.metadata["kind"]
        return [Message("user", prompt.text)]

    def step(self, message):
        if self._kind == "raises":
            raise Unspeakable("\ud800" * 1_000_000)
        text = "a\udfffb" if self._kind == "replies" else "7"
        return Turn([Message("user", text)], 1.0, done=self._kind != "replies")


class SaysSeven(Recited):
    """An engine whose every message is the same."""

    async def generate(self, *arguments, **options):
        self.lines = ["7"]
        return await super().generate(*arguments, **options)


KINDS = ("fine", "prompt", "replies", "raises")


async def train(directory):
    """Train two batches of prompts of every kind, and return the accounts and the failures."""
    config = QueuesConfig(max_attempts=1, retry_seconds=0.0, max_staleness=1)
    spec = RunSpec(groups_per_batch=2, group_size=2, steps=2)
    broker = Broker(directory, config=config, spec=spec)
    prompts = [
        Prompt(
            prompt_id=f"red/0/{number}",
            text="3+4=" + "\ud800" * (kind == "prompt"),
            answer="\udc00",
            metadata={"kind": kind, "\ud800": ["\ud800"]},
        )
        for number, kind in enumerate(KINDS * 4)
    ]
    runner = episodes(
        SaysSeven(), SAMPLING, renderer=Renderer(AnyCharacter()), new_environment=ByPrompt,
        environment="m:ByPrompt", rewards=["tags"],
    )  # fmt: skip
    worker = RolloutWorker(
        ActorStatistics("engine-0"), broker, runner.run, interrupt=asyncio.Event().wait,
        max_concurrent_rollouts=4, largest_group=2, heartbeat_seconds=60.0,
    )  # fmt: skip
    await broker.issue(prompts, cursor="16")
    stop = asyncio.Event()
    working = asyncio.create_task(worker.run(stop))
    await worker.on_version(0)
    for version in range(2):
        while (batch := await broker.take(version, timeout=1.0)) is None:
            assert not working.done(), working.exception()
        assert len(batch.payloads) == 2
        await broker.ack(version, {"loss": 0.0})
        await worker.on_version(version + 1)
    accounts = await broker.accounting()
    await broker.close()
    await asyncio.wait_for(working, 10)
    with open_ledger(directory) as ledger:
        return accounts, failed_prompts(ledger)


def test_a_worker_and_its_broker_go_on_and_keep_an_account_of_what_failed(tmp_path):
    accounts, failed = asyncio.run(asyncio.wait_for(train(tmp_path), 60))
    assert accounts.balanced
    assert accounts.trained == 4
    assert set(accounts.failed) == {"prompt", "environment"}
    assert all(len(prompt.error) <= 16_000 for prompt in failed)
    errors = {int(prompt.prompt_id.rpartition("/")[2]) % 4: prompt.error for prompt in failed}
    assert "prompt 'red/0/" in errors[1]
    assert "a lone surrogate, U+D800, at 4" in errors[1]
    assert "a lone surrogate, U+DFFF, at 1" in errors[2]
    assert "raised <Unspeakable whose repr fails> on prompt 'red/0/" in errors[3]
