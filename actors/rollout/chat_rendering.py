"""Messages to token ids, and sampled token ids to text.

Sampled tokens are never rendered again: a conversation grows by the ids of new messages, which are
appended. Tools and images of chat templates are not supported.
"""

from collections.abc import Sequence
from typing import Any, Literal

from actors.environments.protocol import Message
from actors.errors import InputError, PromptRefused
from actors.foreign_text import surrogate

PLACEHOLDER = "\ue000"
"""Stands for a message of the policy when the template renders what follows it."""


class Renderer:
    """Renders conversations with a tokenizer of transformers.

    Without a chat template, the contents of the messages are concatenated.

    Raises:
        InputError: `chat_template` is True and the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, chat_template: bool | Literal["auto"] = "auto") -> None:
        has_template = tokenizer.chat_template is not None
        if chat_template is True and not has_template:
            raise InputError(
                "actors.chat_template = true, but the tokenizer has no chat template; "
                'use false or "auto"'
            )
        self.tokenizer = tokenizer
        self._templated = has_template and chat_template is not False
        self._last: tuple[tuple[Message, ...], list[int]] = ((), [])
        """Prompt and ids of the last call: every rollout of a group renders the same prompt."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages that begin a conversation; raise PromptRefused as `encode`."""
        key = tuple(messages)
        if key != self._last[0]:
            text = self._template(key) if self._templated else _joined(key)
            self._last = key, encode(self.tokenizer, text)
        return [*self._last[1]]

    def continuation(self, messages: Sequence[Message], last: int) -> list[int]:
        """Return the ids to append after a message of the policy, whose last token is `last`.

        That token is not repeated where the template ends messages with it.

        Raises:
            InputError: The chat template changes earlier messages once later ones follow, so that
                nothing can be appended.
            PromptRefused: A character that the tokenizer does not know, or a role that the template
                refuses.
        """
        if not self._templated:
            return encode(self.tokenizer, _joined(messages))
        user, policy = Message("user", "-"), Message("assistant", PLACEHOLDER)
        before = self._template([user])
        whole = self._template([user, policy, *messages])
        if not whole.startswith(before) or whole.count(PLACEHOLDER) != 1:
            raise InputError(
                "the chat template rewrites earlier messages, so that a conversation of several "
                "turns cannot be continued; use actors.chat_template = false"
            )
        ids = encode(self.tokenizer, whole.partition(PLACEHOLDER)[2])
        return ids[1:] if ids[:1] == [last] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a message of the policy, without end-of-sequence and other special tokens."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _template(self, messages: Sequence[Message]) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            raise PromptRefused(
                f"the chat template cannot write messages of {roles}: {error}"
            ) from error
        return text


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message.content for message in messages)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a text without special tokens; raise PromptRefused for a character without a token.

    Lone surrogates have none anywhere. A tokenizer with a separate token for unknown characters has
    one for every other character.
    """
    if problem := surrogate(text):
        raise PromptRefused(f"the text has {problem}, which no tokenizer takes: {text[:80]!a}")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown == tokenizer.pad_token_id and unknown in ids:
        character = next(
            (c for c in text if unknown in tokenizer.encode(c, add_special_tokens=False)), None
        )
        if character is not None:
            raise PromptRefused(
                f"the tokenizer has no token for {character!r} in {text[:80]!r}, and would write "
                "it as padding; leave it out, or add it to the model's characters"
            )
    return ids
