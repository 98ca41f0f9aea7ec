"""Prompts to token ids, and sampled token ids to text: one function for everything that needs it.

Everything takes the ids of a prompt from `Renderer.prompt`, and engines are given these. Sampled
tokens are never rendered again: a conversation grows by the ids of new messages.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.foreign_text import surrogate
from headway.errors import InputError

PLACEHOLDER = "\ue000"
"""Stands for a message of the policy when the template renders what follows it."""
PASSED_ON = {"tools", "documents"}
"""Parameters of `apply_chat_template` that templates read; the others are no template options."""


class Renderer:
    """Renders conversations with a tokenizer of transformers.

    With a chat template, a text has the special tokens that the template writes and no others.
    Without one, the contents of the messages are concatenated, after the tokens that the tokenizer
    itself puts before a text, such as BOS. `chat_template` and `options` are actors.chat_template
    and actors.chat_template_options; those that do not fit the tokenizer raise InputError.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: bool | Literal["auto"] = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        has_template = tokenizer.chat_template is not None
        if chat_template is True and not has_template:
            raise InputError(
                "actors.chat_template = true, but the tokenizer has no chat template; "
                'use false or "auto"'
            )
        self.tokenizer = tokenizer
        self.templated = has_template and chat_template is not False
        self._options = dict(options or {})
        self._check_options()
        self._before_texts = before_texts(tokenizer)
        self._adds_space = _after_newline(tokenizer, "0") != _encode(tokenizer, "0")
        self._last: tuple[tuple[Message, ...], list[int]] = ((), [])
        """Prompt and ids of the last call: every rollout of a group renders the same prompt."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages that begin a conversation; raise PromptRefused as `encode`."""
        key = tuple(messages)
        if key != self._last[0]:
            if self.templated:
                ids = encode(self.tokenizer, self.written(key, reply=True))
            else:
                ids = encode(self.tokenizer, _joined(key))
                before = self._before_texts
                ids = ids if before and ids[: len(before)] == before else [*before, *ids]
            self._last = key, ids
        return [*self._last[1]]

    def continuation(self, messages: Sequence[Message], last: int) -> list[int]:
        """Return the ids to append after a message of the policy, whose last token is `last`.

        That token is not repeated where the template ends messages with it. Raises InputError if
        the chat template changes earlier messages once later ones follow, so that nothing can be
        appended, and PromptRefused for a role that it refuses or a character without a token.
        """
        if not self.templated:
            return self.following(_joined(messages))
        ids = encode(self.tokenizer, self._after_reply(messages, reply=True))
        return ids[1:] if ids[:1] == [last] else ids

    def turn_end(self) -> str:
        """Return what the chat template writes after the last message of the policy."""
        return self._after_reply([], reply=False) if self.templated else ""

    def following(self, text: str) -> list[int]:
        """Return the ids of a text that stands after other text, without a space put before it."""
        ids = encode(self.tokenizer, text)
        return _after_newline(self.tokenizer, text) if self._adds_space else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a message of the policy, without end-of-sequence and other special tokens."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def written(self, messages: Sequence[Message], *, reply: bool) -> str:
        """Write messages by the template, `reply` up to one of the policy; raise PromptRefused."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=reply, **self._options
            )
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            raise PromptRefused(
                f"the chat template cannot write messages of {roles}: {error}"
            ) from error
        return text

    def _after_reply(self, messages: Sequence[Message], *, reply: bool) -> str:
        """Return what the template writes after a message of the policy that others follow."""
        user, policy = Message("user", "-"), Message("assistant", PLACEHOLDER)
        before = self.written([user], reply=False)
        whole = self.written([user, policy, *messages], reply=reply)
        expected = 1 + sum(message.content.count(PLACEHOLDER) for message in messages)
        if not whole.startswith(before) or whole.count(PLACEHOLDER) != expected:
            raise InputError(
                "the chat template rewrites earlier messages, so that a conversation of several "
                "turns cannot be continued; use actors.chat_template = false"
            )
        return whole.partition(PLACEHOLDER)[2]

    def _check_options(self) -> None:
        if not self._options:
            return
        names = ", ".join(sorted(self._options))
        if not self.templated:
            raise InputError(
                f"actors.chat_template_options names {names}, but prompts are rendered without a "
                "chat template; leave it out"
            )
        others = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - PASSED_ON
        unread = self._options.keys() - (read_by(self.tokenizer, self._options).keys() - others)
        if unread:
            raise InputError(
                f"actors.chat_template_options names {', '.join(sorted(unread))}, which the chat "
                "template of this tokenizer does not read"
            )


def read_by(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the chat template of a tokenizer reads; none without a template."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, Mapping) else [template]
    return {k: v for k, v in options.items() if any(re.search(rf"\b{k}\b", t) for t in texts)}


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message.content for message in messages)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a text without special tokens; raise PromptRefused for a character without a token.

    Lone surrogates have none anywhere. A tokenizer with a separate token for unknown characters has
    one for every other character.
    """
    if problem := surrogate(text):
        raise PromptRefused(f"the text has {problem}, which no tokenizer takes: {text[:80]!a}")
    ids = _encode(tokenizer, text)
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown == tokenizer.pad_token_id and unknown in ids:
        character = next((c for c in text if unknown in _encode(tokenizer, c)), None)
        if character is not None:
            raise PromptRefused(
                f"the tokenizer has no token for {character!r} in {text[:80]!r}, and would write "
                "it as padding; leave it out, or add it to model.tiny.characters of a tiny model"
            )
    return ids


def before_texts(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer itself puts before a text, such as BOS."""
    text = "0" if _encode(tokenizer, "0") else tokenizer.eos_token  # some have no token for digits
    plain, full = _encode(tokenizer, text), list(tokenizer.encode(text, add_special_tokens=True))
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _after_newline(tokenizer: Any, text: str) -> list[int]:
    """Encode a text as after a line break, which keeps a tokenizer from putting a space before."""
    before, whole = _encode(tokenizer, "\n"), _encode(tokenizer, f"\n{text}")
    merged = whole[: len(before)] != before
    return _encode(tokenizer, text) if merged else whole[len(before) :]
