"""Random trees of requests: what agents ask, however they ask it, goes on from what was sampled.

An agent here goes on with its chats, forks, edits and compresses them, asks twice, at once, and
sends messages back with other white space, ids of calls and spellings of arguments. The policy's
tokens are any tokens at all: no text would be encoded so.
"""

import json
from dataclasses import dataclass

import pytest
from chats import TOOLS, assistant, sampled, template, tokenizer, tool, user
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.session import Session
from queues.records import FinishReason
from tests.property_examples import costly

NAMES = ["characters", "qwen3_tools", "llama3_tools"]
PLAIN = ["", "a", "so it is", "3+4=7", " and\n"]
ODD = ["<|im_end|>", "x</think>y", "<tool_call>{", "<|eot_id|>", "</", "\ue000é"]
THOUGHTS = ["<think>\nhm\n</think>\n\nso", "<think>\n\n</think>\n\n7"]
SUMMARY = {"role": "system", "content": "so far: 7"}
CALLS = [("add", {"a": 1, "b": [2, "<|im_end|>"]}), ("find", {}), ("find", {"<|eot_id|>": "é"})]


@dataclass
class Asked:
    """One request and its answer, as the test knows them."""

    messages: list
    tools: object
    request: object
    ids: list
    reply: dict
    number: int = -1

    def history(self):
        *before, last = self.messages
        if last["role"] != "assistant":
            return [*self.messages, self.reply]
        calls = [*last.get("tool_calls", ()), *self.reply.get("tool_calls", ())]
        joined = assistant((last["content"] or "") + self.reply["content"])
        return [*before, joined | ({"tool_calls": calls} if calls else {})]


def compared(messages):
    """Return what counts of messages, by the test's own reading."""
    return [
        (
            message["role"],
            (message["content"] or "").strip(),
            [
                (call["function"]["name"], json.loads(call["function"]["arguments"] or "{}"))
                for call in message.get("tool_calls", ())
            ],
        )
        for message in messages
    ]


class Agent:
    """Draws requests and answers, and remembers them."""

    def __init__(self, draw, name):
        self.draw, self.name = draw, name
        self.texts = PLAIN if name == "characters" else PLAIN + ODD
        special = {*tokenizer(name).all_special_ids}
        self.ids = st.integers(0, len(tokenizer(name)) - 1).filter(lambda i: i not in special)
        self.done, self.flying, self.log = [], [], []

    def one_of(self, *values):
        return self.draw(st.sampled_from(values))

    def sent_back(self, message):
        """Return a message of the policy as a client may send it back."""
        text = message["content"]
        back = assistant(self.one_of(text, f"{text}\n", f" {text}") or self.one_of("", None))
        calls = [
            {
                "id": f"other_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(
                        dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=1
                    ),
                },
            }
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        return back | ({"tool_calls": calls} if calls else {})

    def next_messages(self):
        kind = self.one_of("on", "on", "on", "new", "fork", "edit", "compress", "retry", "continue")
        if not self.done or kind == "new":
            return [SUMMARY] * self.one_of(0, 1) + [user(self.one_of(*self.texts))]
        last = self.done[-1] if kind in ("on", "continue") else self.one_of(*self.done)
        if kind == "retry":
            return last.messages
        *before, reply = last.history()
        history = [*before, self.sent_back(reply)]
        if kind == "compress":
            return [SUMMARY, *history[self.one_of(1, len(history)) :], user("go on")]
        if kind == "edit":
            changed = self.one_of(*range(len(history)))
            history[changed] = history[changed] | {"content": "edited"}
        if kind == "continue":
            return history
        calls = len(reply.get("tool_calls", ()))
        new = [tool(self.one_of(*self.texts), f"c{n}") for n in range(calls)]
        new += [user(self.one_of(*self.texts))] * (not new or self.one_of(0, 0, 1))
        return [*history, *new] + [assistant("edited")] * self.one_of(0, 0, 0, 1)

    def reply(self):
        """Return sampled tokens, perhaps cut off, and a message that they may be parsed as."""
        texts = self.texts if self.name == "characters" else self.texts + THOUGHTS
        calls = self.draw(st.lists(st.sampled_from(CALLS), max_size=2))
        thinks = self.one_of(0, 0, 1)
        ids = self.draw(st.lists(self.ids, min_size=1, max_size=6))
        cut, content = self.one_of(False, False, True), self.one_of(*texts)
        # thoughts are sampled too, so a message whose content is all that was sampled has none
        thinks = thinks and tokenizer(self.name).decode(ids).strip() != content.strip()
        message = assistant(content, *calls, **({"reasoning": "hm"} if thinks else {}))
        return ids if cut else [*ids, tokenizer(self.name).eos_token_id], message

    def begin(self, session):
        messages, tools = self.next_messages(), self.one_of(TOOLS, TOOLS, TOOLS, None)
        request = session.begin(messages, tools)
        ids, reply = self.reply()
        asked = Asked(messages, tools, request, ids, reply)
        self.check(asked)
        self.flying.append(asked)
        self.log.append(("begin", asked))

    def complete(self, session):
        asked = self.flying.pop(self.one_of(*range(len(self.flying))))
        number = len(self.done)
        assert session.recorded(asked.request) is None
        turn = session.complete(asked.request, answer(self.name, asked, number), asked.reply)
        asked.number = number
        assert turn.number == number
        assert session.path(number) == asked.request.ids + asked.ids
        self.done.append(asked)
        self.log.append(("complete", asked))

    def check(self, asked):
        """Assert that a prompt begins with the longest path whose messages it begins with."""
        messages, stored = compared(asked.messages), []
        for turn in self.done:
            history = compared(turn.history())
            if turn.tools == asked.tools and messages[: len(history)] == history:
                stored.append((len(history), turn))
        longest = max((length for length, _ in stored), default=0)
        if not longest:
            return
        new = asked.messages[longest:]
        paths = [turn.request.ids + turn.ids for length, turn in stored if length == longest]
        if not new:
            end = tokenizer(self.name).eos_token_id
            paths = [path[:-1] if path[-1] == end else path for path in paths]
            assert asked.request.ids in paths
            return
        goes_on = any(asked.request.ids[: len(path)] == path for path in paths)
        said = [message for turn in self.done for message in (turn.reply, turn.history()[-1])]
        unshown = any(map(self.unshown, said))
        assert goes_on or (unshown and any(message["role"] != "tool" for message in new))
        if goes_on:
            assert asked.request.extends >= 0

    def unshown(self, reply):
        """Return whether a template may leave out what the policy said."""
        beside = self.name == "llama3_tools" and "tool_calls" in reply and reply["content"].strip()
        return beside or "reasoning" in reply or "think>" in reply["content"]


def answer(name, asked, number):
    ended = asked.ids[-1] == tokenizer(name).eos_token_id
    return sampled(asked.ids, number, FinishReason.STOP if ended else FinishReason.LENGTH)


def paths(tokens):
    """Return the positions in the row of each segment's path."""
    starts = [0, *(segment.start for segment in tokens.segments), len(tokens.token_ids)]
    found = [[*range(starts[1])]]
    for n, (_, parent, prefix) in enumerate(tokens.segments, 1):
        found.append([*found[parent][:prefix], *range(starts[n], starts[n + 1])])
    return found


@st.composite
def agents(draw, name):
    agent, session = Agent(draw, name), Session(template(name))
    for _ in range(draw(st.integers(1, 10))):
        agent.begin(session)
        while agent.flying and agent.one_of(True, True, False):
            agent.complete(session)
    while agent.flying:
        agent.complete(session)
    return agent, session


@pytest.mark.parametrize("name", NAMES)
@costly
@given(data=st.data())
def test_every_sampled_token_stands_once_after_what_was_seen(name, data):
    agent, session = data.draw(agents(name))
    tokens = session.tokens()
    rows = paths(tokens)
    positions = []
    for turn in agent.done:
        whole = turn.request.ids + turn.ids
        began = len(turn.request.ids)
        owned = [
            path[began : len(whole)]
            for path in rows
            if [tokens.token_ids[i] for i in path[: len(whole)]] == whole
            and [tokens.versions[i] for i in path[began : len(whole)]]
            == [turn.number] * len(turn.ids)
        ]
        assert owned
        assert all(places == owned[0] for places in owned)
        positions += owned[0]
        assert [tokens.behavior_logprobs[i] for i in owned[0]] == sampled(turn.ids).logprobs
    assert sorted(positions) == [i for i, mask in enumerate(tokens.loss_mask) if mask]
    assert len({*positions}) == len(positions) == session.sampled
    others = [i for i, mask in enumerate(tokens.loss_mask) if not mask]
    assert all(tokens.versions[i] == -1 and tokens.behavior_logprobs[i] == 0.0 for i in others)
    assert tokens.prompt_length == len(agent.done[0].request.ids)
    assert (tokens.turns, tokens.left_out) == (len(agent.done), {})
    for number, (start, parent, prefix) in enumerate(tokens.segments, 1):
        assert 0 <= parent < number
        assert start < len(tokens.token_ids)
        assert prefix <= len(rows[parent])


@pytest.mark.parametrize("name", NAMES)
@costly
@given(data=st.data())
def test_a_session_of_saved_turns_repeats_their_answers_and_goes_on(name, data):
    agent, session = data.draw(agents(name))
    saved, again = [], Session(template(name))
    for event, asked in agent.log:
        if event == "complete":
            request = again.begin(asked.messages, asked.tools)
            request.ids = asked.request.ids
            saved.append(again.complete(request, answer(name, asked, asked.number), asked.reply))
    assert again.tokens() == session.tokens()
    kept = data.draw(st.integers(0, len(saved)))
    again, requests = Session(template(name), saved[:kept]), {}
    for event, asked in agent.log:
        if event == "begin":
            requests[id(asked)] = again.begin(asked.messages, asked.tools)
            continue
        request = requests[id(asked)]
        assert request.ids == asked.request.ids
        turn = again.recorded(request)
        assert turn == (saved[asked.number] if asked.number < kept else None)
        generation = answer(name, asked, asked.number)
        assert again.complete(request, generation, asked.reply) == saved[asked.number]
    assert again.tokens() == session.tokens()


def test_a_saved_answer_is_not_taken_for_the_same_one_that_was_given_with_other_tools():
    asked, ids, reply = [user("a")], tokenizer("characters").encode("so"), assistant("so")
    session = Session(template("characters"))
    first, second = (
        session.complete(session.begin(asked, TOOLS), sampled(ids, number), reply)
        for number in range(2)
    )
    again = Session(template("characters"), [first, second])
    request = again.begin(asked, TOOLS)
    assert again.recorded(request) == first
    again.complete(request, sampled(ids), reply)
    again.begin([*asked, reply, user("b")])
    assert again.recorded(again.begin(asked, TOOLS)) == second


@costly
@given(data=st.data())
def test_turns_say_where_their_prompts_stand_in_earlier_ones(data):
    agent, _ = data.draw(agents("qwen3_tools"))
    session, known = Session(template("qwen3_tools")), {-1: []}
    for event, asked in agent.log:
        if event == "complete":
            generation = answer("qwen3_tools", asked, asked.number)
            turn = session.complete(asked.request, generation, asked.reply)
            assert turn.parent < turn.number
            prompt = [*known[turn.parent][: turn.shared], *turn.injected]
            assert prompt == asked.request.ids
            assert turn.shared == max(shared(path, prompt) for path in known.values())
            known[turn.number] = [*prompt, *turn.token_ids]


def shared(left, right):
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
