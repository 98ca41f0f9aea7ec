"""A source, an environment and a reward that do everything that such code must not do.

A run is given a copy of this file. Its first prompts are those of `KINDS`, one of each; the others
are fine. `ENVIRONMENT` has the kinds of the environment, `REWARD` those of the reward, with what
becomes of the group: "fine", or the reason by which it fails.
"""

import asyncio
import concurrent.futures
import ctypes
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from actors.environments.protocol import Message, Turn
from queues.records import Prompt

SECRET = "RED_TEAM_TOKEN"
"""Name of a secret variable of the environment."""
MARKUP = "[red]<script>alert(1)</script>[/]&amp;\x1b[2J\x1b]0;owned\x07\u202e\r\n\u2028$\\frac{$"


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


class Base(BaseException):
    pass


class Deceitful(str):
    """A text that lies about its length, and says so in escape codes."""

    def __len__(self):
        return 1

    def __repr__(self):
        return "\x1b[31m" + str.__repr__(self)


def raises(error):
    def act():
        raise error

    return act


def recurses():
    return recurses()


def says(text, reward=0.0, *, done=False, role="user"):
    return lambda: Turn([Message(role, text)], reward, done=done)


def prints(count=1):
    block = "x" * (1 << 20)
    for _ in range(count):
        print(block)
        print(block, file=sys.stderr)
    return finish()


def finish():
    return Turn([], 0.5, done=True)


def then(*acts):
    """Return a function that does everything, whatever fails, and ends the conversation well."""

    def act():
        for step in acts:
            step()
        return finish()

    return act


def secret():
    return os.environ.get(SECRET, "no secret")


def threads():
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def orphan():
    subprocess.Popen(["sleep", "120"], start_new_session=True)


def broken_streams():
    sys.stdout = sys.stderr = None


def log():
    logging.getLogger("hostile").error("%s\n2026-01-01 00:00:00 ERROR forged %s", secret(), MARKUP)
    warnings.warn(f"{secret()} {MARKUP}", stacklevel=1)


ENVIRONMENT = {
    "fine": (finish, "fine"),
    "SystemExit": (raises(SystemExit(0)), "environment"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), "environment"),
    "GeneratorExit": (raises(GeneratorExit()), "environment"),
    "CancelledError": (raises(asyncio.CancelledError()), "environment"),
    "CancelledError of a pool": (raises(concurrent.futures.CancelledError()), "environment"),
    "StopIteration": (raises(StopIteration(1)), "environment"),
    "StopAsyncIteration": (raises(StopAsyncIteration()), "environment"),
    "TimeoutError": (raises(TimeoutError()), "environment"),
    "MemoryError": (raises(MemoryError()), "environment"),
    "BaseException": (raises(Base("base")), "environment"),
    "BrokenPipeError": (raises(BrokenPipeError()), "environment"),
    "group of errors": (raises(ExceptionGroup("g", [ValueError("\ud800")] * 50)), "environment"),
    "recursion": (recurses, "environment"),
    "no repr": (raises(Unspeakable()), "environment"),
    "long error": (raises(ValueError("\ud800\x1b" * 2_000_000)), "environment"),
    "error with markup": (raises(ValueError(MARKUP)), "environment"),
    "error with the secret": (lambda: raises(ValueError(f"key={secret()}"))(), "environment"),
    "error with the secret at the cut": (
        lambda: raises(ValueError("x" * 3985 + secret()))(), "environment"),
    "error with an address": (
        raises(ValueError("GET https://me:hunter2hunter@host/?api_key=abc12345")), "environment"),
    "sleeps": (lambda: time.sleep(3600), "environment"),
    "None": (lambda: None, "environment"),
    "text": (lambda: "7", "environment"),
    "NaN": (says("7", float("nan")), "environment"),
    "infinite": (says("7", float("inf")), "environment"),
    "long integer": (says("7", 10**400), "environment"),
    "reward as text": (says("7", "1"), "environment"),
    "message of None": (says(None), "environment"),
    "message as a dict": (lambda: Turn([{"role": "user"}], 0.0, done=False), "environment"),
    "messages as a generator": (
        lambda: Turn((Message("user", "7") for _ in "ab"), 0.0, done=False), "environment"),
    "50 MB": (says("7" * 50_000_000), "fine"),
    "a million messages": (
        lambda: Turn([Message("user", "7")] * 1_000_000, 0.0, done=False), "fine"),
    "lone surrogate": (says("a\ud800b"), "prompt"),
    "NUL": (says("a\0b"), "prompt"),
    "markup": (says(MARKUP), "prompt"),
    "secret in a reply": (lambda: says(secret())(), "prompt"),
    "deceitful text": (says(Deceitful("\ud800" * 100)), "prompt"),
    "hostile role": (says("7", role="\x1b[31m\0\ud800" * 1000, done=True), "fine"),
    "special tokens": (says("<eos><pad><bos>", done=True), "fine"),
    "prints": (lambda: prints(40), "fine"),
    "prints past Python": (
        then(*[lambda: os.write(1, b"y" * (1 << 20))] * 40, lambda: os.write(2, b"\xff\x00\x1b")),
        "fine"),
    "prints the secret": (then(lambda: print(secret()), log), "fine"),
    "prints the secret past Python": (
        then(lambda: os.write(2, f"raw {secret()}\n".encode()), lambda: os.system("env >&2")),
        "fine"),
    "breaks the streams": (then(broken_streams), "fine"),
    "forgets the environment": (then(lambda: os.environ.pop(SECRET, None), log), "fine"),
    "another folder": (then(lambda: os.chdir("/")), "fine"),
    "threads": (then(threads), "fine"),
    "a process that stays": (then(orphan), "fine"),
    "other seeds": (then(lambda: random.seed(0)), "fine"),
    "a thread that raises": (
        then(lambda: threading.Thread(target=raises(SystemError(MARKUP))).start()), "fine"),
}  # fmt: skip
COROUTINES = (
    "SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "StopIteration",
    "BaseException", "recursion",
)  # fmt: skip
"""Kinds of the environment that are played by a coroutine too."""


def names(count, name=""):
    return lambda: {f"{name}{number}": 1.0 for number in range(count)}


def _is_open(number):
    return Path(f"/proc/self/fd/{number}").exists()


def kills_parent():
    os.kill(os.getppid(), 9)
    return 1.0


REWARD = {
    "leaves": (raises(SystemExit(3)), "reward"),
    "ends its process": (lambda: os._exit(3), "reward"),
    "crashes": (lambda: ctypes.string_at(0), "reward"),
    "sleeps": (lambda: time.sleep(3600), "reward"),
    "gobbles": (lambda: float(len(bytearray(1 << 40))), "reward"),
    "NaN": (lambda: float("nan"), "reward"),
    "text": (lambda: "\x1b[2J", "reward"),
    "a thousand parts": (names(1000), "reward"),
    "long names": (names(1, "x" * 1000), "reward"),
    "names of control": (names(3, MARKUP), "fine"),
    "lone surrogate": (names(1, "\ud800"), "reward"),
    "prints": (lambda: [print("z" * (1 << 20)) for _ in range(40)] and 1.0, "fine"),
    "raises markup": (raises(ValueError(MARKUP)), "reward"),
    "raises the environment": (lambda: raises(ValueError(f"{dict(os.environ)}"))(), "reward"),
    "writes to its channel": (
        lambda: [os.write(n, b"junk\n") for n in range(1, 12) if _is_open(n)], "reward"),
    "closes its channel": (lambda: os.closerange(0, 64) or 1.0, None),
    "kills its parent": (kills_parent, None),
    "reads the secret": (lambda: float(SECRET in os.environ), "fine"),
}  # fmt: skip
KINDS = (
    [f"environment: {kind}" for kind in ENVIRONMENT]
    + [f"coroutine: {kind}" for kind in COROUTINES]
    + [f"reward: {kind}" for kind in REWARD]
)


class Source:
    """A prompt of every kind, and then fine ones; the option `judge` names kinds of the judge."""

    def __init__(self, *, options, seed, split="train", heldout_size=0):
        self.kinds = [*KINDS, *(f"judge: {kind}" for kind in options.get("judge", ()))]
        self.position, self.split = 0, split

    def next(self, count):
        print("source " + "s" * 200_000)
        prompts = []
        for _ in range(count):
            fine = self.split != "train" or self.position >= len(self.kinds)
            kind = "environment: fine" if fine else self.kinds[self.position]
            metadata = {"kind": kind, MARKUP: [MARKUP, {"\u202e": None}]}
            prompts.append(
                Prompt(
                    prompt_id=f"{self.split}/0/{self.position}",
                    text=f"{self.position}+{len(self.split)}=",
                    answer=kind, metadata=metadata,
                )
            )  # fmt: skip
            self.position += 1
        return prompts

    def cursor(self):
        return json.dumps(self.position)

    def restore(self, cursor):
        self.position = json.loads(cursor)


class Environment:
    def reset(self, prompt):
        self.way, _, self.kind = prompt.metadata["kind"].partition(": ")
        return [Message("user", prompt.text)]

    def step(self, message):
        if self.way == "coroutine":
            return self.later()
        return ENVIRONMENT[self.kind][0]() if self.way == "environment" else finish()

    async def later(self):
        return ENVIRONMENT[self.kind][0]()


def score(prompt, completion, answer, metadata):
    way, _, kind = metadata["kind"].partition(": ")
    return REWARD[kind][0]() if way == "reward" else 1.0
