"""One prompt has the same token ids in training, evaluation, `try`, `sft` and reward models."""

import ast
import asyncio
import json
import re

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.assembly import build_rewards, build_runner
from actors.engines.model_folder import load_tokenizer
from actors.engines.protocol import Generation
from actors.environments.single_turn import opening
from actors.reward_models.folder import load_reader
from actors.rewards.pool import RewardPool
from actors.rollout.chat_rendering import Renderer
from actors.sources.filters import shorter
from actors.sources.load_source import load_source
from deploy.config.loader import load_recipe
from deploy.offline.try_recipe import try_recipe
from deploy.offline.warm_start import Demonstrations
from deploy.preflight.inputs import Inputs
from deploy.preflight.prompts import OpenedPrompts
from headway.errors import InputError
from queues.records import FinishReason, Lease, Purpose
from tests.actors.characters import character_tokenizer
from tests.actors.real_tokenizers import real_tokenizer
from tests.deploy.conftest import call_main

FORMATS = ["qwen3", "llama3", "mistral", "gemma", "none", "bos", "tools"]
SYSTEM = {"role": "system", "content": " Be short. "}
RECIPE = """
name = "one"
steps = 1
[model]
path = "model"
[prompts]
source = "files"
source_options = {{ path = "prompts.jsonl" }}
groups_per_batch = 1
group_size = 2
[actors]
engine = "scripted"
reward = ["exact_match"]
max_new_tokens = 8
{more}
"""


def tokenizer_of(name):
    if name not in ("none", "bos"):
        return real_tokenizer("qwen3" if name == "tools" else name)
    tokenizer = character_tokenizer()
    if name == "bos":
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    return tokenizer


@pytest.fixture
def folder(request, tmp_path):
    """Write a recipe, a model of the format and two prompts: a text, and messages."""
    name = request.param
    tokenizer = tokenizer_of(name)
    tokenizer.save_pretrained(tmp_path / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    ask = [{"role": "user", "content": " 3+4=\n"}]
    system = [] if name in ("mistral", "gemma", "none", "bos") else [SYSTEM]
    rows = [{"prompt": "3+4= ", "answer": "7"}, {"prompt": [*system, *ask], "answer": "7"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = 'environment = "tools"\nchat_template_options = { thinks = true }'
    if name == "tools":
        template = tmp_path / "model" / "chat_template.jinja"
        template.write_text("{{ '!' if thinks }}" + template.read_text())
    (tmp_path / "one.toml").write_text(RECIPE.format(more=more if name == "tools" else ""))
    return tmp_path


@pytest.fixture
def config(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return load_recipe("one.toml", [])


def source_of(config):
    return load_source("files", options=config.prompts.source_options, seed=config.seed)


class Listener:
    """An engine that notes what it is given."""

    async def generate(self, request_id, prompt_ids, sampling, *, cache_salt=None):
        self.given = list(prompt_ids)
        return Generation(
            token_ids=[2], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP,
            cache_salt="0",
        )  # fmt: skip


def played(config, tokenizer, prompt, purpose):
    """Return the ids that an engine is given for a prompt, in a rollout of some purpose."""
    engine = Listener()
    rewards = build_rewards(config.actors, pool=RewardPool(), reward_model_client=None)
    episodes = build_runner("engine-0", config.actors, engine, tokenizer, 512, rewards)
    lease = Lease(
        group_id="g", attempt=1, prompt=prompt, group_size=1, purpose=purpose, temperature=None,
        start_version=0, deadline_version=None,
    )  # fmt: skip
    asyncio.run(episodes.run(lease, 0))
    return engine.given


@pytest.mark.parametrize("folder", FORMATS, indirect=True)
def test_a_prompt_has_the_same_token_ids_wherever_it_is_rendered(config):
    tokenizer, shown = load_tokenizer("model"), []
    demonstrations, read = Demonstrations(config, "model"), load_reader("model")
    renderer = Renderer(tokenizer)
    opened = OpenedPrompts(
        source=source_of(config), first=[], of_parts=[], problems=[], evaluations=[]
    )
    try_recipe(config, Inputs("model", opened), 2, shown.append)
    tried = re.findall(r"\[0:\d+\] given.*\n.*\n  tokens (\[.*\])", "\n".join(shown))
    for prompt, printed in zip(source_of(config).next(2), tried, strict=True):
        ids = played(config, tokenizer, prompt, Purpose.TRAIN)
        assert ids == played(config, tokenizer, prompt, Purpose.EVALUATE)
        assert ids == ast.literal_eval(printed)
        messages = tuple(opening(prompt))
        for given in (messages, prompt.text) if len(messages) == 1 else (messages,):
            token_ids, mask = demonstrations.render((given, "7"))
            assert token_ids[: len(ids)] == ids
            assert mask == [False] * len(ids) + [True] * (len(mask) - len(ids))
        if config.actors.environment == "single_turn":
            assert read(messages, "7")[: len(ids)] == ids
            assert shorter(renderer, len(ids))(prompt)
            assert not shorter(renderer, len(ids) - 1)(prompt)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_what_cannot_be_rendered_is_refused_before_anything_is_loaded(config, folder):
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b\nc"}))
    for setting, message in (
        ('actors.stop=["\\n"]', "has a stop before its end, where a rollout would end"),
        ("actors.stop=[9999999]", "actors.stop has the id 9999999"),
        (
            "actors.chat_template_options={ enable = false }",
            "names enable, which the chat template",
        ),
    ):
        settings = ["--set", "sft.demonstrations=pairs.jsonl", "--set", setting]
        refused = call_main(["sft", "one.toml", *settings], folder)
        assert refused.returncode == 2
        assert message in " ".join(refused.stderr.split())
        assert not (folder / "runs").exists()


class Greeting:
    """An environment that begins in its own way."""

    def reset(self, prompt):
        return [*opening(prompt), *opening(prompt)]

    def step(self, message):
        raise NotImplementedError


@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
def test_a_demonstration_begins_as_the_environment_does(config):
    path = f"{__name__}:Greeting"
    actors = config.actors.model_copy(update={"environment": path})
    render = Demonstrations(config.model_copy(update={"actors": actors}), "model").render
    text = load_tokenizer("model").decode(render(("3+4=", "7"))[0])
    assert text.count("3+4=") == 2
    with pytest.raises(InputError, match=r"must have at most 512, the context of the model"):
        render(("3" * 600, "7"))
