"""Messages to token ids, and sampled token ids to text.

What the policy sampled is never rendered again: a conversation grows by the ids of new messages,
which are appended to the ids that are there. Leaves out tools and images.
"""

from collections.abc import Sequence
from typing import Any, Literal

from actors.environments.protocol import Message
from actors.errors import InputError, PromptRefused

SPOKEN = "\ue000"
"""Stands for what the policy said where the template is asked what follows it."""


class Renderer:
    """A tokenizer and a way to write conversations with it.

    Args:
        tokenizer: Of transformers.
        chat_template: Whether to use the tokenizer's; "auto": if it has one. Without, messages are
            the plain text of their contents, and nothing is added to it.

    Raises:
        InputError: A chat template is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, chat_template: bool | Literal["auto"] = "auto") -> None:
        has_template = tokenizer.chat_template is not None
        if chat_template is True and not has_template:
            raise InputError(
                "actors.chat_template = true, but the tokenizer has no chat template; "
                'use false or "auto"'
            )
        self._tokenizer = tokenizer
        self._templated = has_template and chat_template is not False
        self._last: tuple[tuple[Message, ...], list[int]] = ((), [])
        """The prompt that was asked for last, and its ids: each rollout of a group asks for it."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages that begin a conversation, up to where the policy speaks.

        Raises:
            PromptRefused: A character that the tokenizer does not know.
        """
        asked = tuple(messages)
        if asked != self._last[0]:
            self._last = asked, self._prompt(asked)
        return [*self._last[1]]

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        if self._templated:
            return self._encode(self._template(messages, speaks=True))
        return self._encode("".join(message.content for message in messages))

    def continuation(self, messages: Sequence[Message], last: int) -> list[int]:
        """Ids to append after a message of the policy.

        Args:
            messages: What is said after it.
            last: Its last token. Where that is how the template ends a message, it is not repeated.

        Raises:
            InputError: The chat template writes earlier messages differently once later ones
                follow, so that nothing can be appended.
            PromptRefused: A character that the tokenizer does not know, or a role that the template
                does not.
        """
        if not self._templated:
            return self._encode("".join(message.content for message in messages))
        asked = [Message("user", "-")]
        before = self._template(asked, speaks=True)
        whole = self._template([*asked, Message("assistant", SPOKEN), *messages], speaks=True)
        if not whole.startswith(before) or whole.count(SPOKEN) != 1:
            raise InputError(
                "the chat template rewrites earlier messages, so that a conversation of several "
                "turns cannot be continued; use actors.chat_template = false"
            )
        ids = self._encode(whole.partition(SPOKEN)[2])
        return ids[1:] if ids[:1] == [last] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, without end-of-sequence and other special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _template(self, messages: Sequence[Message], *, speaks: bool) -> str:
        said = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=speaks
            )
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            raise PromptRefused(
                f"the chat template cannot write messages of {roles}: {error}"
            ) from error
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        foreign = unknown_character(self._tokenizer, text, ids)
        if foreign is not None:
            raise PromptRefused(
                f"the tokenizer has no token for {foreign!r} in {text[:80]!r}, and would write it "
                f"as padding; leave it out, or add it to the model's characters"
            )
        return ids


def unknown_character(tokenizer: Any, text: str, ids: Sequence[int]) -> str | None:
    """The first character that a tokenizer would write as padding; None if there is none.

    A token of its own for what is unknown is the tokenizer's way, and counts as known.

    Args:
        tokenizer: Of transformers.
        text: What was encoded.
        ids: Its token ids.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown != tokenizer.pad_token_id or unknown not in ids:
        return None
    encode = tokenizer.encode
    return next((c for c in text if unknown in encode(c, add_special_tokens=False)), None)
