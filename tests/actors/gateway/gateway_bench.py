"""A gateway under test, on a loop that outlives the single test."""

import asyncio
from functools import partial
from itertools import pairwise

from actors.engines.protocol import SamplingParameters
from actors.gateway.open_session import SessionLimits
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.gateway.template import ChatTemplate
from actors.rollout.chat_rendering import Renderer
from tests.actors.gateway.agent_model import agent_tokenizer

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=1)


class GatewayBench:
    """The gateway on an engine, its sessions, and the turns that these have saved."""

    def __init__(self, engine, config, template=None) -> None:
        from actors.gateway.vllm_app import serving_app

        self.engine = engine
        self.runner = asyncio.Runner()
        make_app = partial(serving_app, engine, config, SAMPLING)
        self.gateway = Gateway(config.gateway, make_app)
        self.template = template or ChatTemplate(Renderer(agent_tokenizer()))
        self.saved = []
        if engine._engine is None:
            self.run(engine.start(), seconds=120)
        self.run(self.gateway.start())

    def run(self, coroutine, seconds=60):
        return self.runner.run(asyncio.wait_for(coroutine, seconds))

    def open(self, *, on_turn=None, recorded=(), **limits):
        async def save(turn):
            self.saved.append(turn)

        given = SessionLimits(**{"turns": 20, "tokens": 2000, "seconds": 60, **limits})
        return self.gateway.open(Session(self.template, recorded), given, on_turn or save)

    def close(self) -> None:
        self.run(self.gateway.close())
        self.run(self.engine.close())
        self.runner.close()


def check_exact(session) -> None:
    """Check that every prompt but the first begins with the whole path of the turn before."""
    result = session.tokens()
    assert result.segments == []
    paths = [session.path(number) for number in range(session.turns)]
    for before, after in pairwise(paths):
        assert after[: len(before)] == before
    assert len(result.token_ids) == len(paths[-1])
    for mask, logprob, version in zip(
        result.loss_mask, result.behavior_logprobs, result.versions, strict=True
    ):
        assert (version >= 0) == mask
        assert logprob <= 0 if mask else logprob == 0
