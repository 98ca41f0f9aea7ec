"""Functions and classes that a user might name by a path in a recipe: good ones and bad ones."""

import asyncio
import threading
from dataclasses import replace
from functools import partial

from actors.environments.protocol import Message, Turn
from queues.records import Prompt

BLOCKED = threading.Event()


def length(prompt, completion, answer, metadata):
    return len(completion)


async def patient(prompt, completion, answer, metadata):
    await asyncio.sleep(0)
    return 0.25


def giving(value):
    """Return a reward that returns a value."""

    def reward(prompt, completion, answer, metadata):
        return value

    return reward


several = giving({"form": 0.5, "content": 1})
not_a_number = giving(float("nan"))
none = giving(None)
text = giving({"form": "good"})
nothing = giving({})


def raises(prompt, completion, answer, metadata):
    raise ZeroDivisionError("by nothing")


def stops(prompt, completion, answer, metadata):
    raise StopIteration


def delegates(prompt, completion, answer, metadata):
    return patient(prompt, completion, answer, metadata)


async def hangs_politely(prompt, completion, answer, metadata):
    await asyncio.Event().wait()


def reason(prompt, completion, answer, metadata):
    return 1.0 if metadata["finish_reason"] == "stop" else 0.0


class Countdown:
    """Asks `answer` times, and pays 0.5 for every reply."""

    def reset(self, prompt):
        self.left = int(prompt.answer)
        return [Message("user", prompt.text)]

    def step(self, message):
        self.left -= 1
        return Turn([Message("user", f"left {self.left}")], 0.5, done=self.left == 0)


def answering(change):
    """Return an environment that answers with what a function makes of Countdown's turn."""

    class Answering(Countdown):
        def step(self, message):
            return change(super().step(message))

    return Answering


Seesaw = answering(lambda turn: replace(turn, reward=-1.0 if turn.done else 1.0))
Flat = answering(lambda turn: replace(turn, reward=0.0))
Unpaid = answering(lambda turn: replace(turn, reward=None) if turn.done else turn)
Verbose = answering(lambda turn: replace(turn, messages=[Message("user", "a" * 200_000)]))
Blocked = answering(lambda turn: BLOCKED.wait())
Mute = answering(lambda turn: "done")
Priceless = answering(lambda turn: Turn([], float("inf"), done=True))
Boundless = answering(lambda turn: Turn([], 10**400, done=True))


class Listener(Countdown):
    """Tells the policy nothing, and pays for every message that it has not heard before."""

    heard = ()

    def step(self, message):
        news, self.heard = message.content not in self.heard, (*self.heard, message.content)
        return replace(super().step(message), messages=[], reward=float(news))


class Painted(Countdown):
    """Has an option."""

    def __init__(self, *, colour):
        self.colour = colour


MEETING = threading.Barrier(1)


class Meeting(Countdown):
    """Answers when as many conversations as are awaited have asked."""

    def reset(self, prompt):
        self.left = 2
        return [Message("user", prompt.text)]

    def step(self, message):
        MEETING.wait(5)
        return super().step(message)


class BuiltTogether(Countdown):
    """Is built when as many conversations as are awaited are being built."""

    def __init__(self):
        MEETING.wait(5)


class Unbuilt(Countdown):
    """Is never built."""

    def __init__(self):
        BLOCKED.wait()


class Unbuildable(Countdown):
    """Cannot be built."""

    def __init__(self):
        raise OSError("no such world")


class Broken(Countdown):
    """Cannot begin."""

    def reset(self, prompt):
        raise OSError("no such world")


class Wordy(Countdown):
    """Begins with text in place of messages."""

    def reset(self, prompt):
        return prompt.text


class Wordless(Countdown):
    """Begins with a message that has no text."""

    def reset(self, prompt):
        return [Message("user", None)]


class Shown:
    """A source with worked examples of its own, held-out ones among them."""

    def __init__(self, *, options, seed, split, heldout_size):
        self.heldout_size = heldout_size

    def next(self, count):
        return [Prompt(prompt_id=f"shown/0/{i}", text=str(i)) for i in range(count)]

    def cursor(self):
        return "{}"

    def restore(self, cursor):
        pass

    def demonstrations(self, *, first, step=1):
        for number in range(first, 10**9, step):
            yield str(number % 10), str(self.heldout_size)


class Threes:
    """The smallest prompt source."""

    def __init__(self, *, options, seed, split, heldout_size):
        self.arguments = (options, seed, split, heldout_size)

    def next(self, count):
        return [Prompt(prompt_id="threes/0/0", text="3", answer="3")] * count

    def cursor(self):
        return "{}"

    def restore(self, cursor):
        pass


class Judged(Threes):
    """A source with preferences of every wrong kind."""

    def preferences(self, *, gives):
        if gives == "error":
            raise KeyError("lost")
        yield from {"pair": [("p", "a")], "numbers": [("p", 1, 2)], "equal": [("p", "a", "a")]}.get(
            gives, []
        )


def shout(text: str, times: int = 1) -> str:
    """Says it louder."""
    return text.upper() * times


twice = partial(shout, times=2)


async def whisper(text: str) -> str:
    await asyncio.sleep(0)
    return text.lower()


def calculator(expression: str) -> str:
    return expression


def fails_to_open() -> str:
    raise FileNotFoundError(2, "no such page")
