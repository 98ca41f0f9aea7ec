"""Texts that cannot be encoded: each fails its own rollout, which names the prompt."""

import sys
from pathlib import Path

import pytest

from actors.engines.protocol import SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.errors import RolloutFailed
from actors.rollout.chat_rendering import Renderer
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
async def test_it_fails_its_rollout_and_names_the_prompt(case, monkeypatch):
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
        await runner.run(lease(text=text), 0)
    assert caught.value.reason == ("environment" if case.place == "error" else "prompt")
    assert case.place == "error" or "lone surrogate" in str(caught.value)
