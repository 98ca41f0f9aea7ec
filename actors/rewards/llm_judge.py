"""The reward `llm_judge`: a language model behind an OpenAI-compatible address reads and marks.

    [actors]
    reward = ["llm_judge"]
    reward_options = { llm_judge = { url = "http://10.0.0.5:8000/v1", model = "Qwen/Qwen3-32B" } }

What fails in passing, or answers without a mark, is asked again, ever later; a judge that stays
away is no fault of the completion. A reply that was cut off, or can be read in two ways, has no
mark. Calls are counted against a budget of each actor, the repeated ones included; when it is used
up, rollouts fail and so the run ends, saying so.
"""

import asyncio
import os
import random
import re
from collections.abc import Mapping
from typing import Any

import httpx

from actors.errors import InputError, RewardFailed, RewardModelLost

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
"""Reads "7", "Score: 7.", "7/10" and "7 out of 10", and no reply with a sign or another number."""
OWN_FIELDS = frozenset({"model", "messages", "temperature", "max_tokens"})
"""What a request has from other options."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses of which another attempt may be free."""
LONGEST_WAIT = 30.0


class LlmJudge:
    """Asks for marks.

    Args:
        url: Base address, up to and with "/v1".
        model: As the server names it.
        instruction: Of one message of the user's; {prompt}, {completion}, {answer} and {largest}
            are put in.
        pattern: Finds the mark in the reply: its first group, else all of it. Where it finds
            several they must be the same. Without one the mark is the only number of the reply,
            but for the largest mark behind it, as in "7/10" or "7 out of 10".
        largest: Mark that is worth 1; 0 is worth 0, and others are refused.
        temperature: Of the judge.
        max_tokens: Of its reply, what it thinks before included; one that is cut off has no mark.
        body: More fields of the request, as {"chat_template_kwargs": {"enable_thinking": False}}.
        seconds: Deadline of one attempt; all of them have actors.reward_timeout_seconds.
        attempts: Most of them for one mark.
        backoff_seconds: Wait before the second attempt; it doubles with each, and varies.
        at_once: Most calls of this actor at a time.
        max_calls: Budget of this actor, anew when it was started again; None has no end.
        key_variable: Environment variable with the key, where the server wants one.

    Raises:
        InputError: An option that cannot be used.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        instruction: str = INSTRUCTION,
        pattern: str | None = None,
        largest: float = 10.0,
        temperature: float = 0.0,
        max_tokens: int = 16,
        body: Mapping[str, Any] | None = None,
        seconds: float = 10.0,
        attempts: int = 4,
        backoff_seconds: float = 0.5,
        at_once: int = 16,
        max_calls: int | None = None,
        key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        if pattern is None:
            pattern = ONE_NUMBER.replace("{largest}", re.escape(f"{largest:g}"))
        self._pattern = _checked(url, pattern, largest, attempts, at_once, body or {})
        self._url, self._model, self._instruction = url.rstrip("/"), model, instruction
        self._largest, self._temperature, self._max_tokens = largest, temperature, max_tokens
        self._body = dict(body or {})
        self._seconds, self._attempts, self._backoff = seconds, attempts, backoff_seconds
        self._places = asyncio.Semaphore(at_once)
        self._max_calls, self.calls = max_calls, 0
        key = os.environ.get(key_variable)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._certificates = httpx.create_ssl_context()

    async def __call__(
        self, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
    ) -> float:
        """The mark, from 0 to 1.

        Raises:
            RewardModelLost: The server cannot be reached, or is overloaded.
            RewardFailed: It refuses the request or gives no mark, or the budget is used up.
        """
        given = {
            "prompt": prompt,
            "completion": completion,
            "answer": answer or "none",
            "largest": f"{self._largest:g}",
        }
        text = re.sub(
            rf"\{{({'|'.join(given)})\}}", lambda found: given[found[1]], self._instruction
        )
        failure: RewardFailed | RewardModelLost
        for attempt in range(self._attempts):
            try:
                return self._mark(await self._ask(text))
            except _TryAgain as again:
                failure = again.failure
                wait = max(again.after, self._backoff * 2**attempt * random.uniform(0.5, 1.5))
            if attempt + 1 < self._attempts:
                await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise failure

    async def _ask(self, text: str) -> str:
        """The reply to a message."""
        async with self._places:
            if self._max_calls is not None and self.calls >= self._max_calls:
                raise RewardFailed(
                    f"may not ask {self._url} any more: all {self._max_calls} calls of this actor "
                    "are used up (max_calls)"
                )
            self.calls += 1
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": text}],
                "temperature": self._temperature,
                "max_tokens": self._max_tokens,
                **self._body,
            }
            client = httpx.AsyncClient(
                timeout=self._seconds, headers=self._headers, verify=self._certificates
            )  # one a call: nobody would close one that lasts
            try:
                async with client:
                    response = await client.post(f"{self._url}/chat/completions", json=body)
            except httpx.HTTPError as error:
                lost = RewardModelLost(f"{self._url} does not answer: {error!r}")
                raise _TryAgain(lost) from error
        return self._content(response)

    def _content(self, response: httpx.Response) -> str:
        said = f"{self._url} answered {response.status_code}: {response.text[:200]!r}"
        if response.status_code in PASSING:
            raise _TryAgain(RewardModelLost(said), _seconds(response.headers.get("Retry-After")))
        if not response.is_success:
            raise RewardFailed(said)
        try:
            choice = response.json()["choices"][0]
            content, ended = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise RewardFailed(said) from None
        if ended == "length":
            raise _TryAgain(
                RewardFailed(
                    f"{self._url} was cut off after max_tokens = {self._max_tokens}, having said "
                    f"{str(content)[:200]!r}; let it say more, or think less (body)"
                )
            )
        return content if isinstance(content, str) else ""

    def _mark(self, reply: str) -> float:
        group = min(self._pattern.groups, 1)
        try:
            (mark,) = {float(found[group] or "") for found in self._pattern.finditer(reply)}
        except ValueError:  # none, several, or no number
            mark = -1.0
        if not 0 <= mark <= self._largest:
            raise _TryAgain(
                RewardFailed(
                    f"{self._url} gave no one mark from 0 to {self._largest:g}: {reply[:200]!r}"
                )
            )
        return mark / self._largest


class _TryAgain(Exception):
    """This attempt failed, and the next may not."""

    def __init__(self, failure: RewardFailed | RewardModelLost, after: float = 0.0) -> None:
        self.failure, self.after = failure, after


def _seconds(header: str | None) -> float:
    """What `Retry-After` says where it says seconds."""
    try:
        return float(header or 0)
    except ValueError:
        return 0.0


def _checked(
    url: str,
    pattern: str,
    largest: float,
    attempts: int,
    at_once: int,
    body: Mapping[str, Any],
) -> re.Pattern[str]:
    place = "actors.reward_options.llm_judge:"
    if not url.startswith(("http://", "https://")):
        raise InputError(f'{place} url = {url!r} must be like "http://host:8000/v1"')
    if largest <= 0 or attempts < 1 or at_once < 1:
        raise InputError(
            f"{place} largest = {largest}, attempts = {attempts} and at_once = {at_once} must all "
            "be above 0"
        )
    if own := sorted(OWN_FIELDS & body.keys()):
        raise InputError(f"{place} body may not have {', '.join(own)}: set that option instead")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{place} pattern = {pattern!r}: {error}") from None
