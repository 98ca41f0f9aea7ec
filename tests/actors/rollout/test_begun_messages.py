"""Messages that have begun: by the assistant's that ends a prompt, or by the chat template."""

import asyncio
import copy

import pytest
from characters import TEMPLATE, character_tokenizer
from dialogues import NAMES, SAMPLING, Engine
from fakes import Recited, episodes, ids, lease
from real_tokenizers import real_tokenizer

from actors.environments.protocol import Message, Turn
from actors.environments.single_turn import conversation
from actors.errors import PromptRefused
from actors.rewards.rewards import Score
from actors.rollout.chat_rendering import Renderer
from actors.rollout.demonstrations import judged
from queues.records import FinishReason

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
TEMPLATES = {
    "no generation prompt": HEAD,
    "opens a thought": HEAD + PROMPT + "<think>\n{% endif %}",
    "writes an empty thought": HEAD + PROMPT + "<think>\n\n</think>\n\n{% endif %}",
    "writes Gemma's empty thought": HEAD + PROMPT + "<|channel>thought\n<channel|>{% endif %}",
    "takes thoughts out": HEAD.replace("m.content", "m.content.split('</think>')[-1]")
    + PROMPT + "<think>\n{% endif %}",
    "closes earlier thoughts": HEAD.replace(
        "{{ m.content", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content"
    ) + PROMPT + "<think>\n{% endif %}",
    "has empty thoughts": HEAD.replace(
        "{{ m.content", "{{ '<think></think>\n' if m.role == 'assistant' }}{{ m.content"
    ) + PROMPT + "{% endif %}",
    "always has empty thoughts": HEAD.replace(
        "{{ m.content", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content"
    ) + PROMPT + "<think></think>{% endif %}",
    "writes a space": "{% for m in messages %}{{ 'Q:' if m.role == 'user' else 'A: ' }}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "speaks otherwise": HEAD + "{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}",
}  # fmt: skip


def tokenizer_of(name):
    if name in NAMES:
        return real_tokenizer(name)
    tokenizer = copy.deepcopy(real_tokenizer("qwen3"))
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


@pytest.mark.reported("prompt_ends_with_assistant")
@pytest.mark.parametrize(
    ("name", "begun", "end"),
    [
        ("qwen3", "Sure, ", "<|im_end|>\n<|im_start|>assistant\nSure, "),
        ("qwen3", "<think>\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("llama3", "Sure\n", "<|start_header_id|>assistant<|end_header_id|>\n\nSure\n"),
        ("mistral", "Sure", " [/INST]Sure"),
        ("gemma", "end", "<start_of_turn>model\nend"),
        ("no generation prompt", "Sure", "<|im_end|>\n<|im_start|>assistant\nSure"),
        ("opens a thought", "Sure", "<|im_start|>assistant\nSure"),
        ("opens a thought", "<think>\nWell", "<|im_start|>assistant\n<think>\nWell"),
        ("writes an empty thought", "7", "assistant\n<think>\n\n</think>\n\n7"),
        ("writes an empty thought", "<think>\nWell", "assistant\n<think>\nWell"),
        ("closes earlier thoughts", "7", "assistant\n<think></think>7"),
        ("closes earlier thoughts", "<think>\nWell", "assistant\n<think>\nWell"),
        ("has empty thoughts", "7", "assistant\n<think></think>\n7"),
        ("has empty thoughts", "<think>Well", "assistant\n<think>Well"),
        ("always has empty thoughts", "7", "assistant\n<think></think>7"),
        ("always has empty thoughts", "<think>Well", "assistant\n<think>Well"),
        ("takes thoughts out", "<think>a</think>7", "assistant\n<think>a</think>7"),
        ("writes a space", "7", "A: 7"),
    ],
)
def test_the_policy_goes_on_with_the_message_that_ends_a_prompt(name, begun, end):
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    question, answer = Message("user", "Why?"), Message("assistant", begun)
    prompt = renderer.prompt([question, answer])
    assert tokenizer.decode(prompt).endswith(end)
    assert tokenizer.eos_token_id not in prompt[-len(renderer.following(begun)) :]
    assert renderer.begun([question, answer]) == begun
    later = renderer.continuation([question, answer], tokenizer.eos_token_id)
    assert tokenizer.decode(later).endswith(end)


def test_a_template_without_a_place_for_a_begun_message_is_refused():
    renderer = Renderer(tokenizer_of("speaks otherwise"))
    with pytest.raises(PromptRefused, match="end the prompt with a message of another role"):
        renderer.prompt([Message("user", "Why?"), Message("assistant", "Sure")])


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("opens a thought", "<think>\n"),
        ("closes earlier thoughts", "<think>\n"),
        ("writes an empty thought", ""),
        ("writes Gemma's empty thought", ""),
        ("has empty thoughts", ""),
        ("always has empty thoughts", ""),
        ("qwen3", ""),
    ],
)
def test_what_a_template_opens_for_the_policy_begins_its_messages(name, begun):
    assert Renderer(tokenizer_of(name)).begun([Message("user", "Why?")]) == begun
    assert Renderer(tokenizer_of(name), False).begun([Message("user", "Why?")]) == ""


class Noted:
    """A reward that notes the completions that it is given."""

    def __init__(self):
        self.seen = []

    async def score(self, prompt, completion, finish_reason, *, by_step=False):
        self.seen.append(completion)
        return Score(1.0, {})


class Listener:
    """An environment that notes two messages, and begins the second one itself."""

    def __init__(self):
        self.heard = []

    async def reset(self, prompt):
        return [Message("user", "3+4="), Message("assistant", "a")]

    async def step(self, message):
        self.heard.append(message.content)
        answers = [Message("user", "2"), Message("assistant", "b")]
        return Turn(answers, None, done=len(self.heard) == 2)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_rewards_and_environments_see_the_whole_message_and_its_beginning_does_not_train(template):
    listener, noted, tokenizer = Listener(), Noted(), character_tokenizer(template)
    runner = episodes(
        Recited("c", "d"),
        SAMPLING,
        environment="user_module:Countdown",
        new_environment=lambda: listener,
        renderer=Renderer(tokenizer),
    )
    runner.rewards = noted
    rollout = asyncio.run(runner.run(lease(), 0))
    assert listener.heard == ["ac", "bd"]
    assert noted.seen == ["bd"]
    sampled = [i for i, trains in zip(rollout.token_ids, rollout.loss_mask, strict=True) if trains]
    assert sampled == ids("c<eos>d<eos>")


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_on_with_a_message_keeps_the_space_before_it(name):
    tokenizer = real_tokenizer(name)
    prompt = conversation([Message("user", "Why?"), Message("assistant", "It is")])
    reply = tokenizer.encode("It is because", add_special_tokens=False)
    reply = [*reply[len(tokenizer.encode("It is", add_special_tokens=False)) :]]
    engine = Engine([([*reply, tokenizer.eos_token_id], FinishReason.STOP)])
    runner = episodes(engine, SAMPLING, renderer=Renderer(tokenizer))
    runner.rewards = Noted()
    asyncio.run(runner.run(lease(metadata=prompt), 0))
    assert runner.rewards.seen == ["It is because"]


def test_the_reward_tags_counts_the_tag_that_the_template_opened():
    tokenizer = tokenizer_of("opens a thought")
    said = "hm</think><answer>7</answer>"
    reply = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    engine = Engine([(reply, FinishReason.STOP)])
    runner = episodes(engine, SAMPLING, renderer=Renderer(tokenizer), rewards=("tags",))
    assert asyncio.run(runner.run(lease(), 0)).reward_parts == {"tags": 1.0}


@pytest.mark.parametrize("completion", ["a7", "7"])
def test_a_reward_model_reads_a_begun_message_once(completion):
    tokenizer = character_tokenizer(TEMPLATE)
    messages = [Message("user", "3+4="), Message("assistant", "a")]
    assert tokenizer.decode(judged(Renderer(tokenizer), messages, completion)) == (
        "user:3+4=<eos>\nassistant:a7<eos>\n"
    )
