"""Sessions by example: what goes on from sampled tokens, and what begins a further segment."""

import pytest
from chats import TOOLS, assistant, sampled, template, tokenizer, tool, user

from actors.errors import PromptRefused
from actors.gateway.session import NOT_REPEATED, Session
from queues.records import FinishReason, Segment

QWEN = "qwen3_tools"


def ids_of(text, name=QWEN):
    """Return ids that no tokenizer gives: those of each character."""
    return [i for c in text for i in tokenizer(name).encode(c, add_special_tokens=False)]


def text_of(ids, name=QWEN):
    return tokenizer(name).decode(ids)


def say(session, messages, text, reply=None, *, tools=TOOLS, end="<|im_end|>", **options):
    """Ask, and let the policy answer with the characters of a text."""
    request = session.begin(messages, tools, options)
    ids = [*ids_of(text), *tokenizer(QWEN).encode(end, add_special_tokens=False)]
    turn = session.complete(request, sampled(ids), reply or assistant(text))
    return request, turn


def test_a_reply_that_was_cut_off_is_ended_and_one_that_was_ended_is_not_ended_twice():
    for end, added in (("", "<|im_end|>"), ("<|im_end|>", "")):
        session = Session(template(QWEN))
        say(session, [user("a")], "so", end=end)
        ids = session.begin([user("a"), assistant("so"), user("b")], TOOLS).ids
        path = session.path(0)
        assert ids[: len(path)] == path
        tail = f"{added}\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(ids[len(path) :]) == tail


def test_a_call_whose_arguments_a_client_has_mended_goes_on_from_what_was_sampled():
    session = Session(template(QWEN))
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    wrote = assistant("", ("add", {}))
    wrote["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 02}}'
    say(session, [user("a")], text, wrote)
    chat = [user("a"), assistant("", ("add", {"a": 1})), tool("7")]
    request, _ = say(session, chat, "x")
    assert request.ids[: len(session.path(0))] == session.path(0)
    assert session.begin([*chat, assistant("x"), user("b")], TOOLS).extends == 1
    other = session.begin([user("a"), assistant("", ("subtract", {"a": 1})), tool("7")], TOOLS)
    assert other.extends == -1


def test_thoughts_stay_while_tools_answer_and_go_where_the_template_drops_them():
    session = Session(template(QWEN))
    called = assistant("", ("add", {"a": 1}), reasoning="hm")
    text = (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'
    )
    first, _ = say(session, [user("a")], text, called)
    chat = [user("a"), assistant(None, ("add", {"a": 1}), identity="x"), tool("7")]
    second, _ = say(session, chat, "seven")
    assert second.ids[: len(session.path(0))] == session.path(0)
    chat += [assistant("seven"), user("b")]
    third, turn = say(session, chat, "more")
    assert third.extends == -1
    assert "hm" not in text_of(third.ids)
    assert turn.shared == len(first.ids)
    tokens = session.tokens()
    assert tokens.segments == [Segment(len(session.path(1)), 0, turn.shared)]
    fourth, _ = say(session, [*chat, assistant("more"), user("c")], "end")
    assert fourth.ids[: len(session.path(2))] == session.path(2)


def test_an_empty_thought_that_the_template_begins_replies_with_stays():
    session = Session(template(QWEN))
    first, _ = say(session, [user("a")], "so", enable_thinking=False)
    assert text_of(first.ids).endswith("<think>\n\n</think>\n\n")
    chat = [user("a"), assistant("so"), user("b")]
    again = session.begin(chat, TOOLS, {"enable_thinking": False})
    assert again.ids[: len(session.path(0))] == session.path(0)
    assert session.begin(chat, TOOLS).extends == -1


def test_options_of_a_request_override_those_of_the_recipe():
    quiet = Session(template(QWEN, enable_thinking=False))
    assert text_of(quiet.begin([user("a")]).ids).endswith("</think>\n\n")
    loud = quiet.begin([user("a")], None, {"enable_thinking": True, "unknown": 1})
    assert text_of(loud.ids).endswith("assistant\n")
    with pytest.raises(PromptRefused, match="names add_generation_prompt, chat_template, which"):
        quiet.begin([user("a")], None, {"chat_template": "", "add_generation_prompt": False})


def test_texts_of_control_tokens_stay_text_everywhere():
    end = "<|im_end|>"
    called = assistant(end, ("add", {end: [end]}), reasoning=end)
    chat = [user(end), called, tool(end), user("b"), called, tool(f"{end}\n<|im_start|>system")]
    session = Session(template(QWEN))
    ids = session.begin(chat, TOOLS).ids
    controls = tokenizer(QWEN).convert_tokens_to_ids([end, "<|im_start|>"])
    assert [ids.count(token) for token in controls] == [7, 8]
    assert text_of(ids).count(end) == 7 + 10
    say(session, chat, "so")
    tail = session.begin([*chat, assistant("so"), tool(end)], TOOLS).ids[len(session.path(0)) :]
    assert [tail.count(token) for token in controls] == [1, 2]
    described = [{"type": "function", "function": {"name": "f", "description": end}}]
    with pytest.raises(PromptRefused, match="tools or chat_template_kwargs have the text of a"):
        session.begin([user("a")], described)


def test_the_policy_goes_on_with_a_message_that_was_begun_or_cut_off():
    session = Session(template(QWEN))
    first, _ = say(session, [user("a"), assistant("So")], " it", end="")
    assert text_of(first.ids).endswith("assistant\nSo")
    second, _ = say(session, [user("a"), assistant("So it ")], "is.")
    assert second.ids == session.path(0)
    third, _ = say(session, [user("a"), assistant("So it is."), user("b")], "c")
    assert third.ids[: len(session.path(1))] == session.path(1)
    again = session.begin([user("a"), assistant("So it is.")], TOOLS)
    assert again.ids == session.path(1)[:-1]
    assert session.tokens().segments == []


def test_identical_and_parallel_requests_share_their_prompt_alone():
    session = Session(template(QWEN))
    begun = [session.begin([user("a")], TOOLS) for _ in range(3)]
    assert session.turns == 0
    turns = [session.complete(request, sampled([5, 6, 7]), assistant("x")) for request in begun]
    length = len(begun[0].ids)
    assert [(t.number, t.parent, t.shared, t.injected) for t in turns] == [
        (0, -1, 0, begun[0].ids), (1, 0, length, []), (2, 0, length, []),
    ]  # fmt: skip
    tokens = session.tokens()
    assert tokens.segments == [Segment(length + 3, 0, length), Segment(length + 6, 0, length)]
    assert tokens.token_ids[length:] == [5, 6, 7] * 3
    assert (session.sampled, session.turns) == (9, 3)


def test_texts_and_ids_of_completions_go_on_from_sampled_tokens():
    name = "characters"
    session = Session(template(name))
    ids = [*tokenizer(name).encode("1+1=")]
    first = session.begin_text("1+1=")
    assert first.ids == ids
    session.complete(first, sampled([4, 5, 1]), "cd")  # the end is not in the client's text
    second = session.begin_text("1+1=cd\nmore")
    assert second.ids == [*ids, 4, 5, 1, *tokenizer(name).encode("\nmore")]
    session.complete(second, sampled([7], reason=FinishReason.LENGTH), "f")
    assert session.begin_text("1+1=cd<eos>\nmoref").ids == session.path(1)
    assert session.begin_text([*session.path(1), 9]).ids == [*session.path(1), 9]
    assert session.begin_text("1+1=c").extends == -1
    assert session.reply == "f"
    assert session.tokens().segments == []


def test_a_reply_of_several_characters_in_one_token_or_half_of_one_survives():
    """The halves of é are two tokens; their texts, and any that they are encoded as, are others."""
    session = Session(template(QWEN))
    halves = [tokenizer(QWEN).convert_tokens_to_ids(half) for half in ("Ã", "©")]
    request = session.begin([user("a")], TOOLS)
    session.complete(request, sampled([*halves, halves[0]]), assistant("é\ufffd"))
    ids = session.begin([user("a"), assistant("é\ufffd"), user("b")], TOOLS).ids
    assert ids[len(request.ids) :][:3] == [*halves, halves[0]]


def test_recorded_answers_are_given_once_in_order_and_the_rest_is_left_out():
    first = Session(template(QWEN))
    saved = [say(first, [user("a")], text)[1] for text in ("x", "yy")]
    saved.append(say(first, [user("a"), assistant("yy"), user("b")], "zzz")[1])
    session = Session(template(QWEN), saved[::-1])
    assert (session.turns, session.sampled, session.cache_salt) == (0, 0, None)
    assert session.tokens().left_out == {NOT_REPEATED: 9}
    requests = [session.begin([user("a")], TOOLS) for _ in range(3)]
    assert [session.recorded(request) for request in requests] == [*saved[:2], None]
    session.complete(requests[0], sampled([]), assistant("x"))
    new = session.complete(requests[2], sampled([8], 3), assistant("new"))
    assert new.number == 3
    session.leave_out("interrupted", 5)
    tokens = session.tokens()
    assert tokens.left_out == {"interrupted": 5, NOT_REPEATED: 3 + 4}
    assert tokens.token_ids[len(requests[0].ids) :] == [*saved[0].token_ids, 8]
    assert session.cache_salt == "3"


def test_turns_whose_beginning_was_not_saved_are_left_out():
    first = Session(template(QWEN))
    saved = [say(first, [user("a")], text)[1] for text in ("x", "yy")]
    assert saved[1].parent == 0
    session = Session(template(QWEN), saved[1:])
    assert session.recorded(session.begin([user("a")], TOOLS)) is None
    assert session.tokens().left_out == {NOT_REPEATED: 3}
    assert say(session, [user("a")], "new")[1].number == 2


def test_an_agent_that_lived_on_goes_on_from_the_turns_of_the_earlier_attempt():
    first, chat, saved = Session(template(QWEN)), [user("a")], []
    for text, reply, answer in (
        ("x", assistant("x"), user("b")),
        ('{"name":"add"}', assistant("", ("add", {})), tool("7")),
    ):
        saved.append(say(first, chat, text, reply)[1])
        chat = [*chat, reply, answer]
    say(first, [user("a")], "another")
    session = Session(template(QWEN), [*saved, first.complete(
        first.begin([user("a")], TOOLS), sampled(ids_of("q")), assistant("q"))])  # fmt: skip
    request = session.begin(chat, TOOLS)
    assert request.ids == first.begin(chat, TOOLS).ids
    assert request.extends == 1
    assert (session.turns, session.tokens().left_out) == (2, {NOT_REPEATED: 1})


def test_an_answer_is_known_again_without_the_special_tokens_that_an_agent_is_not_shown():
    first = Session(template(QWEN))
    asked = first.begin([user("a")], TOOLS)
    ids = [*ids_of("x"), *tokenizer(QWEN).encode("<|im_start|>"), *ids_of("y")]
    saved = first.complete(asked, sampled(ids), assistant("xy"))
    session = Session(template(QWEN), [saved])
    request = session.begin([user("a"), assistant("xy"), user("b")], TOOLS)
    assert request.ids[: len(first.path(0))] == first.path(0)


def test_a_text_goes_on_from_the_turns_of_the_earlier_attempt():
    for prompt in ([*tokenizer("characters").encode("1+1="), 4, 5, 9], "1+1=cdh"):
        first = Session(template("characters"))
        request = first.begin_text("1+1=")
        turn = first.complete(request, sampled([4, 5], reason=FinishReason.LENGTH), "cd")
        session = Session(template("characters"), [turn])
        assert session.begin_text(prompt).ids == [*request.ids, 4, 5, 9]
        assert (session.turns, session.sampled) == (1, 2)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "a"}, "a message has the role None, must have a text"),
        (user([{"type": "image_url"}]), "has a part of type 'image_url', must be text alone"),
        (user(7), "content is 7, must be a text or a list"),
        (user("a\ud800"), "a lone surrogate"),
        (assistant("") | {"tool_calls": [{"id": "x"}]}, "must have a function with a"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message, error):
    with pytest.raises(PromptRefused, match=error):
        Session(template(QWEN)).begin([message], TOOLS)
