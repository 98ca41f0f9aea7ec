"""Conversations whose worker dies at any moment go on at their last turn elsewhere."""

import asyncio
from dataclasses import replace

import pytest
import user_module
from fakes import (
    EOS,
    SAMPLING,
    Recited,
    episodes,
    ids,
    lease,
    make_worker,
    open_broker,
    sums,
    working,
)

from actors.outages import timeout, untimed
from actors.rollout.notes import Notes, noted_turns
from queues.records import FinishReason, Purpose, RolloutGroup
from queues.schema import decode, encode
from queues.turns import decode_turn

LINES = [":a;:b;", ":c;", "b=7"]
"""Two calls, one call, and the answer."""
MOMENTS = ["turn/0", "call/0/0", "call/0/1", "turn/1", "call/1/0", "turn/2"]
"""What a whole rollout notes, in its order."""


class Knowing(Recited):
    """Continues any part of its lines; `halts` are a line and after how many tokens it halts."""

    def __init__(self, *lines, halts=None, version=3):
        super().__init__(*lines, version=version)
        self.halts = halts

    async def generate(self, request_id, prompt_ids, sampling, *, cache_salt=None):
        line = self.lines[prompt_ids.count(EOS)]
        whole = [*ids(line), EOS]
        said = next(n for n in range(len(whole))[::-1] if prompt_ids[-n:] == whole[:n] or not n)
        rest = line[said:]
        self.requests.append((request_id, [*prompt_ids], sampling, cache_salt))
        reason = FinishReason.STOP
        if self.halts and self.halts[0] == prompt_ids.count(EOS):
            rest, reason, self.halts = rest[: self.halts[1]], FinishReason.ABORTED, None
        answer = Recited((rest, reason), version=self.version)
        return await answer.generate(request_id, prompt_ids, sampling, cache_salt=cache_salt)


class Book:
    """Keeps notes as the broker does; stops for ever where it is asked to, before or after one."""

    def __init__(self, stops=None, *, before=False):
        self.notes, self.stops, self.before = {}, stops, before
        self.oldest, self.reached = {}, asyncio.Event()

    async def note(self, engine_id, group_id, attempt, index, name, payload, oldest):
        if name == self.stops and self.before:
            await self._stop()
        stays = self.notes.setdefault((index, name), payload)
        self.oldest[name] = oldest
        if name == self.stops:
            await self._stop()
        return stays

    async def _stop(self):
        self.reached.set()
        await asyncio.Event().wait()


@pytest.fixture
def made(monkeypatch):
    """Return the calls of the tool, in their order; its result counts them."""
    calls: list[str] = []

    def look_up(word: str) -> str:
        calls.append(word)
        return f"{word}{len(calls)}"

    monkeypatch.setattr(user_module, "look_up", look_up, raising=False)
    return calls


TOOLS = {
    "environment": "tools",
    "options": {
        "tools": ["user_module:look_up"],
        "style": "plain",
        "markers": (":", ";"),
        "call_reward": 0.25,
    },
}


async def attempt(engine, book, number, *, of=None, saved=None, **settings):
    """Return rollout 1 of this attempt, or None if the book has stopped it, which it does once."""
    runner = episodes(engine, SAMPLING, **settings)
    runner.work = book
    carries = replace(of or lease(), attempt=number, notes={**book.notes})
    playing = asyncio.create_task(runner.run(carries, 1, saved))
    reached = asyncio.create_task(book.reached.wait())
    async with asyncio.timeout(10):
        await asyncio.wait({playing, reached}, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    book.stops = None
    book.reached.clear()
    if playing.done():
        return playing.result()
    playing.cancel()
    await asyncio.wait({playing})
    return None


def content(rollout):
    """Return what is trained of a rollout."""
    times = {"created_at": None, "finished_at": None, "engine_id": ""}
    return replace(rollout, **times)


def stored(rollout):
    """Return a rollout as another worker reads it."""
    group = RolloutGroup(group_id="g1", prompt_id="p", attempt=1, rollouts=[rollout])
    return decode(encode(group)).rollouts[0]


async def uninterrupted(made):
    whole = await attempt(Knowing(*LINES), Book(), 1, **TOOLS)
    assert made == ["a", "b", "c"]
    made.clear()
    return whole


async def test_a_rollout_notes_each_turn_and_call_before_the_next_thing_happens(made):
    book, engine = Book(), Knowing(*LINES)
    rollout = await attempt(engine, book, 1, **TOOLS)
    assert [name for _, name in book.notes] == MOMENTS
    assert [book.oldest[name] for name in MOMENTS] == [3, None, None, 3, None, 3]
    assert [book.notes[1, f"call/{x}"] for x in ("0/0", "0/1", "1/0")] == [
        b'["a1", true]', b'["b2", true]', b'["c3", true]',
    ]  # fmt: skip
    turns = [decode_turn(book.notes[1, f"turn/{n}"]) for n in range(3)]
    assert [(turn.number, turn.parent) for turn in turns] == [(0, -1), (1, 0), (2, 1)]
    path: list[int] = []
    for turn in turns:
        assert turn.shared == len(path)
        path += [*turn.injected, *turn.token_ids]
    assert path == rollout.token_ids
    noted = noted_turns(replace(lease(), notes=book.notes), 1)
    assert sum(len(turn.token_ids) for turn in noted.values()) == sum(rollout.loss_mask)
    assert noted_turns(replace(lease(), notes=book.notes), 0) == {}


@pytest.mark.parametrize(
    ("stops", "before"),
    [(name, False) for name in MOMENTS] + [(f"turn/{n}", True) for n in range(3)],
)
async def test_a_killed_rollout_repeats_no_noted_turn_and_no_call(made, stops, before):
    whole = await uninterrupted(made)
    book, first, second = Book(stops, before=before), Knowing(*LINES), Knowing(*LINES, version=4)
    assert await attempt(first, book, 1, **TOOLS) is None
    noted = [name for _, name in book.notes]
    rollout = await attempt(second, book, 2, **TOOLS)
    assert made == ["a", "b", "c"]
    assert [name for _, name in book.notes] == MOMENTS
    turns = sum(name.startswith("turn") for name in noted)
    assert [name for name, *_ in second.requests] == [f"g1/2/1/{n}" for n in range(turns + 1, 4)]
    assert {salt for *_, salt in second.requests[:1]} <= {None}, "the cache of another engine"
    old = sum(len(decode_turn(book.notes[1, f"turn/{n}"]).token_ids) for n in range(turns))
    sampled = [v for v in rollout.versions if v >= 0]
    assert sampled == [3] * old + [4] * (len(sampled) - old)
    assert content(replace(rollout, versions=whole.versions)) == content(whole)


async def test_a_call_whose_result_was_not_noted_is_made_again_and_no_other(made):
    book = Book("call/0/1", before=True)
    assert await attempt(Knowing(*LINES), book, 1, **TOOLS) is None
    rollout = await attempt(Knowing(*LINES), book, 2, **TOOLS)
    assert made == ["a", "b", "b", "c"]
    assert rollout.reward_parts["environment"] == 0.5


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_a_turn_that_was_interrupted_goes_on_with_its_tokens(made, turn, tokens):
    whole = await uninterrupted(made)
    book = Book()
    begun = await attempt(Knowing(*LINES, halts=(turn, tokens)), book, 1, **TOOLS)
    assert (begun.finish_reason, begun.turns, begun.reward) == (FinishReason.ABORTED, turn + 1, 0)
    second = Knowing(*LINES, version=4)
    rollout = await attempt(second, book, 2, saved=stored(begun), **TOOLS)
    assert made == ["a", "b", "c"]
    assert second.requests[0][0] == f"g1/2/1/{turn + 1}"
    assert second.requests[0][1] == begun.token_ids
    assert rollout.versions[: len(begun.versions)] == begun.versions
    assert content(replace(rollout, versions=whole.versions)) == content(whole)


async def test_an_interrupted_turn_that_was_completed_since_is_taken_from_its_note(made):
    book = Book()
    begun = await attempt(Knowing(*LINES, halts=(1, 1)), book, 1, **TOOLS)
    book.stops = "turn/1"
    engine = Knowing(*LINES, version=4)
    assert await attempt(engine, book, 2, saved=stored(begun), **TOOLS) is None
    rollout = await attempt(engine, book, 3, saved=stored(begun), **TOOLS)
    assert [name for name, *_ in engine.requests] == ["g1/2/1/2", "g1/3/1/3"]
    assert made == ["a", "b", "c"]
    assert rollout.reward == 1.5


@pytest.mark.parametrize("environment", ["Countdown", "Seesaw"])
async def test_an_environment_of_the_users_hears_again_what_the_policy_said(environment):
    lines, of = ["a", "b", "c=3"], lease(answer="3")
    settings = {"environment": f"user_module:{environment}", "of": of}
    whole = await attempt(Knowing(*lines), Book(), 1, **settings)
    book, engine = Book("turn/1"), Knowing(*lines)
    assert await attempt(Knowing(*lines), book, 1, **settings) is None
    rollout = await attempt(engine, book, 2, **settings)
    assert [name for name, *_ in engine.requests] == ["g1/2/1/3"]
    assert content(rollout) == content(whole)


async def test_where_the_environment_answers_otherwise_the_rollout_goes_on_afresh_without_notes():
    """Of three noted turns two agree: the second answer is another."""
    says = iter(["left 3", "left 2", "left 3", "left 9", "left 1", "left 0"])
    changed = user_module.answering(
        lambda turn: replace(turn, messages=[replace(turn.messages[0], content=next(says))])
    )
    settings = {"environment": "m:Changed", "new_environment": changed, "of": lease(answer="4")}
    book, engine = Book("turn/2"), Knowing("a", "b", "c", "d", version=4)
    assert await attempt(Knowing("a", "b", "c", "d"), book, 1, **settings) is None
    before = {**book.notes}
    rollout = await attempt(engine, book, 2, **settings)
    assert [name for name, *_ in engine.requests] == ["g1/2/1/3", "g1/2/1/4"]
    assert engine.requests[0][1][-6:] == ids("left 9")
    assert [v for v in rollout.versions if v >= 0] == [3] * 4 + [4] * 4
    assert (rollout.turns, rollout.finish_reason) == (4, FinishReason.STOP)
    assert book.notes == before


@pytest.mark.parametrize(
    ("settings", "purpose"),
    [
        ({"environment": "single_turn"}, Purpose.TRAIN),
        ({"environment": "user_module:Countdown"}, Purpose.EVALUATE),
    ],
)
async def test_a_single_turn_and_an_evaluation_note_nothing(settings, purpose):
    book = Book()
    runner = episodes(Knowing("b=7"), SAMPLING, **settings)
    runner.work = book
    rollout = await runner.run(replace(lease(answer="1"), purpose=purpose), 1)
    assert (rollout.turns, book.notes) == (1, {})


async def too_long():
    async with timeout(0.05):
        await untimed(asyncio.sleep(0.01))
        await asyncio.Event().wait()


async def test_a_note_that_waits_for_the_disk_is_in_no_deadline():
    async with timeout(0.05):
        async with timeout(0.05):
            await untimed(asyncio.sleep(0.2))
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await too_long()


async def test_the_note_that_is_there_already_is_the_one_that_is_used():
    book = Book()
    book.notes[1, "call/0/0"] = b'["first", true]'
    notes = Notes(book, "engine-0", lease(), 1)

    async def call():
        return "second", True

    assert await notes.recall(0, 0, call) == ["first", True]
    assert await notes.recall(0, 0, call) == ["first", True]


async def conversation_worker(broker, engine, name):
    runner = episodes(engine, SAMPLING, **TOOLS)
    runner.work = broker
    runner.engine_id = name
    worker = make_worker(broker, runner.run, name=name, slots=2)
    await worker.on_version(engine.version)
    return worker


async def test_a_worker_that_dies_leaves_its_conversations_to_another(tmp_path, made):
    """Both rollouts of the group stand after their second turn; the call there hangs."""
    broker, hung = open_broker(tmp_path), asyncio.Event()
    await broker.issue(sums(1), cursor="1")
    kept, note = [], broker.note

    async def last_note(*arguments):
        payload = await note(*arguments)
        kept.append(arguments[4])
        if arguments[4] == "call/1/0":
            if kept.count("call/1/0") == 2:
                hung.set()
            await asyncio.Event().wait()
        return payload

    broker.note = last_note
    first = await conversation_worker(broker, Knowing(*LINES, version=0), "first")
    dying = asyncio.create_task(first.run(asyncio.Event()))
    await asyncio.wait_for(hung.wait(), 10)
    dying.cancel()
    await asyncio.wait({dying})
    await broker.close()

    broker = open_broker(tmp_path)
    [group] = broker.commits.state.groups.in_flight.values()
    assert (group.saved, group.noted) == (None, 0)
    engine = Knowing(*LINES, version=1)
    second = await conversation_worker(broker, engine, "second")
    async with working(second):
        batch = await broker.take(0, 10.0)
    assert await broker.commits.submit(lambda: broker.commits.ledger.oldest("notes")) == {}
    await broker.close()
    assert sorted(made) == sorted(["a", "b", "c"] * 2)
    assert [name.split("/")[-1] for name, *_ in engine.requests] == ["3", "3"]
    for rollout in decode(batch.payloads[0]).rollouts:
        assert [v for v in rollout.versions if v >= 0] == [0] * 11 + [1] * 4
        assert rollout.reward_parts == {"environment": 0.5, "last_answer": 0.0}
    assert second.statistics.statistics()["tokens_generated"] == 8
