"""The parsers of tool calls and of thoughts, with templates of the shape of their models'.

Each model calls a tool twice and then answers, character by character: the next request has the
very ids that were sampled, whatever the parser makes of them.
"""

import asyncio
import copy
from dataclasses import dataclass

import pytest
from chats import tokenizer as known_tokenizer
from real_tokenizers import byte_level
from transformers import AddedToken

from actors.config import ActorsConfig
from actors.gateway.template import ChatTemplate
from actors.rollout.chat_rendering import Renderer
from headway.errors import InputError
from tests.actors.gateway.agents import chat, openai_client
from tests.actors.gateway.gateway_bench import SAMPLING, GatewayBench, check_exact
from tests.actors.gateway.stand_in import stand_in_engine

pytestmark = pytest.mark.vllm

ARGUMENTS = "{% for name, value in call.function.arguments.items() %}"
LLAMA_PYTHONIC = (
    """{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>{{ '\\n\\n' }}
{{- tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>
{{- 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{{ '\\n\\n' }}
{%- if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}("""
    + ARGUMENTS
    + """{{ name }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})
{%- if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content | trim }}
{%- endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant
{{- '<|end_header_id|>' }}{{ '\\n\\n' }}{% endif %}"""
)
MISTRAL = """{{ bos_token }}{% set asked = messages | selectattr('role', 'eq', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' ~ m.content ~ '[/INST]' }}{% elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content }}}[/TOOL_RESULTS]
{%- else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}"""
QWEN_CODER = (
    """{% if tools %}<|im_start|>system{{ '\\n' }}{{ tools | tojson }}<|im_end|>{{ '\\n' }}
{%- endif %}{% for m in messages %}{{ '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) }}
{{- '\\n' }}{% if m.role == 'tool' %}{{ '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- else %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"""
    + ARGUMENTS
    + """{{ '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
DEEPSEEK_R1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{{- '<｜User｜>' ~ m.content }}{% else %}{{ '<｜Assistant｜>' ~ m.content.split('</think>')[-1] }}
{{- eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

THINK = ("<think>", "</think>")
MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
JSON_CALL = '{"name": "add", "parameters": {"a": 1, "b":  2}}'
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":  2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a family of models writes."""

    tool_parser: str | None = "auto"
    reasoning_parser: str | None = None
    template: str
    """Of `chats`, or the text of one."""
    named: tuple[str, str] = ("<|endoftext|>", "<|im_end|>")
    """Begin of text, and end of a turn."""
    special: tuple[str, ...] = ("<|im_start|>",)
    tags: tuple[str, ...] = ()
    """Tokens that are not special."""
    ends: tuple[str, ...] = ()
    """Further tokens at which the engine stops."""

    def tokenizer(self):
        if self.template == "qwen3_tools":
            return copy.deepcopy(known_tokenizer(self.template))
        made = byte_level()
        bos, eos = self.named
        special = [*self.special, *self.ends]
        made.add_special_tokens(
            {"bos_token": bos, "eos_token": eos, "additional_special_tokens": special}
        )
        made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in self.tags])
        texts = {"llama3_tools": known_tokenizer("llama3_tools").chat_template}
        made.chat_template = texts.get(self.template, self.template)
        return made


LLAMA_TOKENS = {
    "named": ("<|begin_of_text|>", "<|eot_id|>"),
    "special": ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "ends": ("<|eom_id|>",),
}
MODELS = {
    "llama3_json": Model(tool_parser="llama3_json", template="llama3_tools", **LLAMA_TOKENS),
    "pythonic": Model(tool_parser="pythonic", template=LLAMA_PYTHONIC, **LLAMA_TOKENS),
    "mistral": Model(template=MISTRAL, named=("<s>", "</s>"), special=MISTRAL_TOKENS),
    "qwen3_coder": Model(template=QWEN_CODER, tags=(*THINK, "<tool_call>", "</tool_call>")),
    "qwen3": Model(template="qwen3_tools", reasoning_parser="qwen3"),
    "deepseek_r1": Model(
        template=DEEPSEEK_R1,
        tool_parser=None,
        reasoning_parser="deepseek_r1",
        named=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        special=("<｜User｜>", "<｜Assistant｜>"),
        tags=THINK,
    ),
}
CALLS = {
    "llama3_json": (JSON_CALL, f"<|python_tag|>{JSON_CALL}<|eom_id|>", "3"),
    "pythonic": ("[add(a=1, b=2)]", "[add(a=1,b= 2)]<|eom_id|>", "3"),
    "mistral": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b":  2}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        "3",
    ),
    "qwen3_coder": (XML_CALL, f"Once more.\n{XML_CALL}", "3"),
    "qwen3": (
        f"<think>\nhm\n</think>\n\n{HERMES_CALL}",
        f"<think>\nso\n</think>\n\n{HERMES_CALL}",
        "<think>\nno\n</think>\n\n3",
    ),
}
"""What models say to call the tool twice, and then."""
THOUGHTS = {
    "qwen3": ("<think>\nhm\n</think>\n\n3", "<think>\nso\n</think>\n\n4"),
    "deepseek_r1": ("hm\n</think>\n\n3", "so\n</think>\n\n4"),
}
"""What models say to two questions."""


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """Return a function that serves a model, each once, which says these texts."""
    made = {}

    def bench(name, says):
        if name not in made:
            model = MODELS[name]
            tokenizer = model.tokenizer()
            engine, client = stand_in_engine(tmp_path_factory.mktemp("model"), tokenizer)
            ends = tokenizer.convert_tokens_to_ids([*model.ends])
            gateway = {"tool_parser": model.tool_parser, "reasoning_parser": model.reasoning_parser}
            template = ChatTemplate(Renderer(tokenizer), ends)
            made[name] = GatewayBench(engine, ActorsConfig(gateway=gateway), template)
            made[name].client = client
            client.ends |= {*ends}
        served = made[name]
        served.client.reset()
        served.saved.clear()
        served.client.says = lambda _: says[len(served.client.prompts) - 1]
        return served

    yield bench
    for served in made.values():
        served.close()


def check_sampled(bench, says):
    """Check that turns are what was said, as it was spelled."""
    for text, turn in zip(says, bench.saved, strict=True):
        said = bench.client.spelled_ids(text)
        assert [*turn.token_ids][: len(said)] == said
        assert len(turn.token_ids) - len(said) == (said[-1] not in bench.client.ends)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_parser_go_on_from_the_very_tokens(benches, name, stream):
    bench = benches(name, CALLS[name])
    opened = bench.open()
    got = bench.run(chat(opened, "1+2", stream=stream))
    assert [calls for _, calls in got] == [["add"], ["add"], []]
    assert got[-1][0].strip() == "3"
    check_sampled(bench, CALLS[name])
    check_exact(opened.session)
    assert bench.client.prompts[2][: len(opened.session.path(1))] == opened.session.path(1)


def test_a_message_that_another_stop_token_ends_is_not_ended_once_more(benches):
    bench = benches("llama3_json", CALLS["llama3_json"])
    opened = bench.open()
    bench.run(chat(opened, "1+2"))
    tokenizer = bench.client.renderer.tokenizer
    tail = bench.client.prompts[2][len(bench.client.prompts[1]) :]
    text = tokenizer.decode(tail[len(bench.saved[1].token_ids) - 1 :])
    assert text.startswith("<|eom_id|><|start_header_id|>ipython<|end_header_id|>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_that_a_template_drops_begin_a_segment_that_is_counted(benches, name, stream):
    bench = benches(name, THOUGHTS[name])
    opened = bench.open()

    async def play():
        messages, texts = [{"role": "user", "content": "1+2"}], []
        async with openai_client(opened) as client:
            for _ in range(2):
                asked = {"model": "m", "messages": messages}
                text, thought = "", ""
                if stream:
                    parts = await client.chat.completions.create(**asked, stream=True)
                    async for part in parts:
                        delta = part.choices[0].delta
                        text += delta.content or ""
                        thought += getattr(delta, "reasoning", None) or ""
                else:
                    answer = await client.chat.completions.create(**asked)
                    message = answer.choices[0].message
                    text, thought = message.content, message.reasoning
                texts.append((text.strip(), thought.strip()))
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and 1"},
                ]
        return texts

    assert bench.run(play()) == [("3", "hm"), ("4", "so")]
    check_sampled(bench, THOUGHTS[name])
    tokens = opened.session.tokens()
    [segment] = tokens.segments
    first, second = bench.client.prompts
    assert first[: segment.prefix] == second[: segment.prefix]
    assert segment.start == len(first) + len(bench.saved[0].token_ids)
    assert sum(tokens.loss_mask) == sum(len(turn.token_ids) for turn in bench.saved)
    assert "hm" not in bench.client.renderer.tokenizer.decode(second)


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"tool_parser": "llama3_json"}, r"llama3_json.*<\|python_tag\|>"),
        ({"tool_parser": "mistral"}, r"mistral.*\[TOOL_CALLS\]|mistral.*tool call token"),
        ({"reasoning_parser": "deepseek_r1"}, "deepseek_r1"),
        ({"tool_parser": "unknown"}, "unknown"),
        ({"reasoning_parser": "unknown"}, "unknown"),
    ],
    ids=str,
)
def test_a_parser_that_the_tokenizer_has_no_tokens_for_is_refused_at_the_start(
    standing, settings, lacks
):
    from actors.gateway.vllm_app import serving_app

    config = ActorsConfig(gateway=settings)
    with pytest.raises(InputError, match=rf"(?s)vLLM cannot serve actors.gateway .*: .*{lacks}"):
        asyncio.run(serving_app(standing.engine, config, SAMPLING))
