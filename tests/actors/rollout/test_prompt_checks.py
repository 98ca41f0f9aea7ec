"""Notes before a run, on what a chat template leaves out and on markers that are never seen."""

import copy
import json
import re
import shutil

import pytest
from real_tokenizers import DATA, real_tokenizer
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from actors.config import ActorsConfig
from actors.engines.model_folder import load_tokenizer
from actors.environments.protocol import Message
from actors.environments.single_turn import conversation
from actors.rollout.chat_rendering import Renderer
from actors.rollout.prompt_checks import check_fit
from headway.errors import InputError
from queues.records import Prompt

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NO_SYSTEM = EACH.replace(TURN, "{% if m.role != 'system' %}" + TURN + "{% endif %}") + PROMPT
NO_TOOL = NO_SYSTEM.replace("system", "tool")
CLOSED = EACH + PROMPT.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
ASKED = [Message("user", "Why?")]
TOOLS = {"environment": "tools"}
TAGS = {"reward": ["tags"]}


def said(folder, caplog, *, template=EACH + PROMPT, messages=ASKED, eos=20001, **settings):
    """Return what is said of a model with this template and with prompts of these messages."""
    tokenizer = copy.deepcopy(real_tokenizer("qwen3"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<think>"]})
    tokenizer.eos_token = tokenizer.decode([eos])
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=30_000, eos_token_id=eos).save_pretrained(folder)
    prompt = Prompt(prompt_id="p", text="Why?", metadata=conversation(messages), answer="7")
    check_fit(str(folder), ActorsConfig(**{"engine": "scripted", **settings}), [prompt])
    return [record.getMessage().removeprefix(f"the chat template of {folder} ")
            for record in caplog.records if record.name == "headway.prompts"]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "roles", "note"),
    [
        (EACH, ["user"], "has no generation prompt: the policy's messages begin without "
         "'<|im_start|>assistant'"),
        (NO_SYSTEM, ["user"], "drops the system message: the policy does not see it"),
        (NO_SYSTEM, ["system", "user"], "drops the system message: the policy does not see it"),
        (EACH + PROMPT, ["system", "user"], None),
        ("", ["system", "user"], None),
        (EACH.replace("<|im_end|>", "") + PROMPT, ["user"], "ends messages with '\\n', which is no "
         "end-of-sequence token of the model nor one of actors.stop: name it there, or rollouts "
         "may not end"),
    ],
)  # fmt: skip
def test_what_a_chat_template_leaves_out_is_said(tmp_path, caplog, template, roles, note):
    messages = [Message(role, "Why?") for role in roles]
    assert said(tmp_path, caplog, template=template, messages=messages) == ([note] if note else [])


@pytest.mark.reported("eos_not_turn_end")
@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({}, True),
        ({"stop": ["<|im_end|>"]}, False),
        ({"eos": 20001}, False),
    ],
)
def test_a_turn_end_that_is_no_end_of_sequence_token_is_said(tmp_path, caplog, settings, noted):
    notes = said(tmp_path, caplog, **{"eos": 20000, **settings})
    assert notes == [
        "ends messages with '<|im_end|>\\n', which is no end-of-sequence token of the model: "
        "rollouts stop there too, as with actors.stop, and warm starts teach it"
    ] * noted  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        (TOOLS, []),
        (TAGS, []),
        (TOOLS | {"skip_special_tokens": True},
         ["'<tool_call>' is never seen: texts are without the special token '<tool_call>'"]),
        (TAGS | {"skip_special_tokens": True},
         ["'<think>' is never seen: texts are without the special token '<think>'"]),
        (TAGS | {"reward_options": {"tags": {"names": ["plan"]}}, "skip_special_tokens": True}, []),
        (TOOLS | {"environment_options": {"markers": ["<|im_end|>", "!"]}},
         ["'<|im_end|>' is never seen: texts are without the special token '<|im_end|>'"]),
        (TOOLS | {"stop": ["</tool_call>"]},
         ["'</tool_call>' is never seen: messages end before the stop '</tool_call>'; set "
          "actors.include_stop = true"]),
        (TOOLS | {"stop": ["</tool_call>"], "include_stop": True}, []),
        (TOOLS | {"template": NO_TOOL, "environment_options": {"reply_role": "user"}}, []),
        (TAGS | {"template": CLOSED},
         [f"'{tag}' is written by the chat template, and is not in the policy's text"
          for tag in ("<think>", "</think>")]),
    ],
)  # fmt: skip
def test_a_marker_that_is_never_seen_is_said(tmp_path, caplog, settings, notes):
    assert said(tmp_path, caplog, **settings) == [f"the marker {note}" for note in notes]


@pytest.mark.parametrize(
    ("template", "settings", "problem"),
    [
        (EACH.replace("m.content", "m.content[0].text"), {}, "drops the text of messages"),
        (NO_TOOL, TOOLS,
         "drops messages of the role 'tool'; set actors.environment_options.reply_role = \"user\""),
        (EACH.replace("{{ m", "{{ raise_exception('no') if m.role == 'tool' }}{{ m", 1),
         TOOLS, 'tool: no; set actors.environment_options.reply_role = "user"'),
    ],
)  # fmt: skip
def test_a_chat_template_that_drops_or_refuses_what_the_policy_needs_is_refused(
    tmp_path, caplog, template, settings, problem
):
    with pytest.raises(InputError, match=re.escape(problem)):
        said(tmp_path, caplog, template=template, **settings)


def test_a_tokenizer_is_read_though_one_in_mistrals_own_format_is_beside_it(tmp_path):
    tokenizer = real_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path)
    MistralConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    shutil.copy(DATA / "tekken_240718.json", tmp_path / "tekken.json")
    assert Renderer(load_tokenizer(str(tmp_path))).turn_end() == "<|im_end|>\n"


def test_a_tokenizer_that_loses_white_space_is_refused(tmp_path):
    real_tokenizer("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    file.write_text(json.dumps(settings))
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="loses white space as LlamaTokenizer"):
        load_tokenizer(str(tmp_path))
