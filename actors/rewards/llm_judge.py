"""The reward `llm_judge`: a language model behind an OpenAI-compatible address gives a mark.

Transient failures and replies without a mark are repeated, with growing waits and within a budget;
a judge that cannot be reached does not count against the completion.
"""

import asyncio
import json
import os
import random
import re
from typing import Any

import httpx
import regex
from pydantic import Field, PrivateAttr, field_validator

from actors.bounded_http import Answer, BadAnswer, NoAnswer, ask
from actors.errors import RewardFailed, RewardModelLost
from actors.outages import is_transient, seconds_asked
from actors.rewards.find_reward import Metadata
from headway.clean_text import register, without_secrets
from headway.recipe_section import Section

INSTRUCTION = """You mark answers. Read the question, the answer, and the reference where there is \
one. Reply with one number from 0, useless, to {largest}, perfect, and nothing else.

Question:
{prompt}

Answer:
{completion}

Reference:
{answer}"""
ONE_NUMBER = r"""(?ix) \A
(?: \D* [^\d\s/+−–-] (?<!\bof) (?<!minus) (?<!negative) )? \s*
(?<![\w.,—]) (\d+ (?:\.\d+)?)
(?: \s* \(? (?: / | (?:out\ )? of ) \s* {largest} (?:\.0+)? )?
(?! \w | \s* (?: [/%] | percent | \(? (?:out\ )? of\b ) )
\D* \Z"""
"""Matches "7", "Score: 7.", "7/10" and "7 out of 10", but no reply with a sign or a second number.
"""
OWN_FIELDS = frozenset({"model", "messages", "temperature", "max_tokens"})
"""Fields of a request that other options set."""
LONGEST_WAIT = 30.0
LARGEST_ANSWER = 4 << 20
"""Bytes of an answer of the server, its reasoning included."""
LONGEST_REPLY = 20_000
"""Characters of a reply that are searched for the mark."""
PATTERN_SECONDS = 0.2
"""Longest search; it blocks the actor."""


class LlmJudge(Section):
    """Asks a language model for marks; the fields are the options of the reward."""

    url: str = Field(pattern=r"^https?://")
    """Base address, up to and with "/v1", as "http://host:8000/v1"."""
    model: str
    """Name of the model on the server."""
    instruction: str = INSTRUCTION
    """Text of one user message; {prompt}, {completion}, {answer} and {largest} are filled in."""
    pattern: re.Pattern[str] | None = None
    """Finds the mark in the reply: its first group, else the whole match. Several matches must be
    the same. None takes the only number of the reply, perhaps with the largest mark behind it, as
    in "7/10" or "7 out of 10"."""
    largest: float = Field(default=10.0, gt=0)
    """Mark that is worth 1; 0 is worth 0, and marks outside are refused."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_tokens: int = 16
    """Most tokens of a reply, its reasoning included; a reply that is cut off has no mark."""
    body: dict[str, Any] = Field(default={})
    """More fields of the request, as {"chat_template_kwargs": {"enable_thinking": False}}."""
    seconds: float = 10.0
    """Deadline of one attempt; all attempts together have actors.reward_timeout_seconds."""
    attempts: int = Field(default=4, ge=1)
    """Most attempts for one mark."""
    backoff_seconds: float = 0.5
    """Wait before the second attempt; it doubles with each, and varies at random."""
    at_once: int = Field(default=16, ge=1)
    """Most concurrent calls of this actor."""
    max_calls: int | None = None
    """Budget of this process, of calls that are answered; a restarted actor begins a new one. None
    has no end."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, where the server wants one."""

    _pattern: Any = PrivateAttr()
    """A pattern of the library regex, whose searches can be limited in time."""
    _slots: asyncio.Semaphore = PrivateAttr()
    _calls: int = PrivateAttr()
    _connection: dict[str, Any] = PrivateAttr()

    @field_validator("body")
    @classmethod
    def _body_has_no_field_of_an_option(cls, value: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(OWN_FIELDS & value.keys()):
            raise ValueError(f"may not have {', '.join(own)}: set that option instead")
        return value

    def model_post_init(self, context: Any) -> None:
        """Make the pattern of the mark and what all calls share."""
        largest = re.escape(f"{self.largest:g}")
        chosen = self.pattern or re.compile(ONE_NUMBER.replace("{largest}", largest))
        self._pattern = regex.compile(chosen.pattern, chosen.flags & ~re.UNICODE)
        self._slots = asyncio.Semaphore(self.at_once)
        self._calls = 0
        register([self.key_variable])
        key = os.environ.get(self.key_variable, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection = {"headers": headers, "verify": httpx.create_ssl_context()}

    async def __call__(
        self, prompt: str, completion: str, answer: str | None, metadata: Metadata
    ) -> float:
        """Return the mark, from 0 to 1.

        Raises RewardModelLost if the server cannot be reached or is overloaded, and RewardFailed if
        it refuses the request or gives no mark, or the budget is used up.
        """
        values = {
            "prompt": prompt,
            "completion": completion,
            "answer": answer or "none",
            "largest": f"{self.largest:g}",
        }
        names = "|".join(values)
        text = re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], self.instruction)
        failure: RewardFailed | RewardModelLost
        for attempt in range(self.attempts):
            try:
                return self._mark(await self._ask(text))
            except _TryAgain as again:
                failure = again.failure
                wait = max(
                    again.after, self.backoff_seconds * 2**attempt * random.uniform(0.5, 1.5)
                )
            if attempt + 1 < self.attempts:
                await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise failure

    async def _ask(self, text: str) -> str:
        async with self._slots:
            if self.max_calls is not None and self._calls >= self.max_calls:
                raise RewardFailed(
                    f"may not ask {self.url} any more: all {self.max_calls} calls of this actor "
                    "are used up (max_calls)"
                )
            self._calls += 1
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": text}],
                "temperature": self.temperature,
                "max_tokens": self.max_tokens,
                **self.body,
            }
            url = f"{self.url.rstrip('/')}/chat/completions"
            try:  # one client for each call: nothing would close a lasting one
                async with httpx.AsyncClient(timeout=None, **self._connection) as client:
                    answer = await ask(
                        client, url, json=body, seconds=self.seconds, most_bytes=LARGEST_ANSWER
                    )
            except NoAnswer as error:
                self._calls -= 1
                lost = RewardModelLost(f"{self.url} does not answer: {error}")
                raise _TryAgain(lost) from None
            except BadAnswer as error:
                raise RewardFailed(f"{self.url} gave {error}") from None
        return self._content(answer)

    def _content(self, answer: Answer) -> str:
        answered = f"{self.url} answered {answer.status}: {answer.text[:200]!r}"
        if is_transient(answer.status):
            pause = seconds_asked(answer.headers.get("retry-after"))
            raise _TryAgain(RewardModelLost(answered, pause), pause)
        if not 200 <= answer.status < 300:
            raise RewardFailed(answered)
        try:
            choice = json.loads(answer.text)["choices"][0]
            content, ended = choice["message"]["content"], choice.get("finish_reason")
            content = without_secrets(content) if isinstance(content, str) else ""
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise RewardFailed(answered) from None
        if ended == "length":
            raise _TryAgain(
                RewardFailed(
                    f"{self.url} was cut off after max_tokens = {self.max_tokens}, having said "
                    f"{content[:200]!r}; let it say more, or think less (body)"
                )
            )
        return content

    def _mark(self, reply: str) -> float:
        group = min(self._pattern.groups, 1)
        matches = self._pattern.finditer(reply[:LONGEST_REPLY], timeout=PATTERN_SECONDS)
        try:
            (mark,) = {float(match[group] or "") for match in matches}
        except TimeoutError:
            raise RewardFailed(
                f"{self.url} gave a reply that `pattern` takes longer than {PATTERN_SECONDS:g} s "
                f"for: {reply[:200]!r}"
            ) from None
        except ValueError:  # none, several, or no number
            mark = -1.0
        if not 0 <= mark <= self.largest:
            raise _TryAgain(
                RewardFailed(
                    f"{self.url} gave no one mark from 0 to {self.largest:g}: {reply[:200]!r}"
                )
            )
        return mark / self.largest


class _TryAgain(Exception):
    """An attempt that failed, although the next may succeed."""

    def __init__(self, failure: RewardFailed | RewardModelLost, after: float = 0.0) -> None:
        self.failure, self.after = failure, after
