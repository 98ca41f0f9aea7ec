"""Prompts to token ids, and sampled token ids to text: one function for everything that needs it.

Everything takes the ids of a prompt from `Renderer.prompt`, and engines are given these. Sampled
tokens are never rendered again: a conversation grows by the ids of new messages.
"""

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Literal

from actors.config import ActorsConfig
from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.rollout.control_tokens import ControlTokens
from actors.rollout.text_encoding import before_texts, encode
from headway.errors import InputError

PLACEHOLDER = "\ue000"
"""Stands for a message of the policy when the template renders what follows it."""
EMPTY_THOUGHT = re.compile(r"(<\|?\w+>)[^<]*<(?:/\w+|\w+\|)>\s*$")
"""A whole thought that a text ends with, and the tag that opens it; Gemma's is <|channel>."""
PASSED_ON = {"tools", "documents"}
"""Parameters of `apply_chat_template` that templates read; the others are no template options."""
USER, POLICY = Message("user", "-"), Message("assistant", PLACEHOLDER)
SAMPLES = [USER, POLICY, USER], [USER, POLICY, Message("tool", "-")], [Message("system", "-"), USER]
"""Harmless conversations, in which a template writes what it puts around messages."""


class Renderer:
    """Renders conversations with a tokenizer of transformers.

    With a chat template, a prompt has the control tokens that the template writes and no others:
    texts of such tokens in messages are encoded as text. Without one, the contents of the messages
    are concatenated, after the tokens that the tokenizer itself puts before a text, such as BOS;
    with `chat_template` false, special tokens in prompts stand for themselves. A message of the
    assistant at the end of a prompt is one that the policy goes on with. The arguments are
    actors.chat_template, chat_template_options and skip_special_tokens; those that do not fit the
    tokenizer raise InputError.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: bool | Literal["auto"] = "auto",
        options: Mapping[str, Any] | None = None,
        *,
        skip_special_tokens: bool = False,
    ) -> None:
        has_template = tokenizer.chat_template is not None
        if chat_template is True and not has_template:
            raise InputError(
                "actors.chat_template = true, but the tokenizer has no chat template; "
                'use false or "auto"'
            )
        self.tokenizer = tokenizer
        self.templated = has_template and chat_template is not False
        self._as_written = chat_template is False
        self._options = dict(options or {})
        self._check_options()
        self._before_texts = before_texts(tokenizer)
        self.control = ControlTokens(tokenizer, self._sample)
        self.hidden = self.control.special if skip_special_tokens else self.control.named
        """Special tokens that decoding leaves out."""
        self._last: tuple[tuple[Message, ...], list[int]] = ((), [])
        """Prompt and ids of the last call: every rollout of a group renders the same prompt."""

    def with_options(self, options: Mapping[str, Any]) -> "Renderer":
        """Return a renderer whose chat template is given further options, such as `tools`."""
        other = copy.copy(self)
        other._options, other._last = {**self._options, **options}, ((), [])
        for derived in ("turn_end_ids", "generation_prompt"):
            other.__dict__.pop(derived, None)
        return other

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages that begin a conversation; raise PromptRefused as `encoded`.

        The template must be able to go on with a message of the assistant at their end.
        """
        key = tuple(messages)
        if key != self._last[0]:
            ids = self.encoded(self.opened, key) if self.templated else self._joined_prompt(key)
            self._last = key, ids
        return [*self._last[1]]

    def continuation(self, messages: Sequence[Message], last: int) -> list[int]:
        """Return the ids to append after a message of the policy, whose last token is `last`.

        That token is not repeated where the template ends messages with it. Raises InputError if
        the chat template changes earlier messages once later ones follow, so that nothing can be
        appended, and PromptRefused for a role that it refuses or a character without a token.
        """
        if not self.templated:
            joined = Message("user", _joined(messages))  # whole: a token may be in two of them
            return self.encoded(_joined, [joined], follows=True)
        ids = self.encoded(lambda written: self._after_reply(written, reply=True), messages)
        return ids[1:] if ids[:1] == [last] else ids

    def encoded(
        self,
        write: Callable[[Sequence[Message]], str],
        messages: Sequence[Message],
        *,
        follows: bool = False,
    ) -> list[int]:
        """Encode what `write` makes of messages, in which only the template has control tokens.

        Raises PromptRefused for a character without a token, or where the template changes a
        message that has the text of a control token, so that the two cannot be told apart.
        """
        control, text = self.control, write(messages)
        ids = encode(self.tokenizer, text, follows=follows)
        guarded = []
        for n, m in enumerate(messages, 1):
            own, last = m.role == "assistant", n == len(messages)
            guarded.append(m.changed(partial(control.guard, own=own, last=last)))
        parted = text if guarded == [*messages] else write(guarded)
        if control.found(ids) == control.written(parted):
            return ids
        if control.unguard(parted) != text:
            raise PromptRefused(
                f"the chat template changes messages with control tokens in their text, so that "
                f"these cannot be told from its own; leave them out of {text[-200:]!r}"
            )
        return control.encode(parted, follows=follows)

    def turn_end(self) -> str:
        """Return what the chat template writes after the last message of the policy."""
        return self._after_reply([], reply=False) if self.templated else ""

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The token that ends a message of the policy in the chat template; empty without one."""
        try:
            return (*self.control.written(self.turn_end())[:1],)
        except (InputError, PromptRefused):  # of use for single turns all the same
            return ()

    @cached_property
    def generation_prompt(self) -> tuple[str, str] | None:
        """Text that it writes for the policy, and text that only earlier messages begin with.

        None where those begin otherwise, so that no message can be written after it.
        """
        if not self.templated:
            return "", ""
        try:
            prompt = self.written([USER], reply=True)
            header = self.written([USER, POLICY, USER], reply=False).partition(PLACEHOLDER)[0]
        except PromptRefused:
            return None
        if prompt.startswith(header):
            thought = EMPTY_THOUGHT.search(prompt)
            length = min(len(header), thought.start() if thought else len(header))
            return prompt[length:], ""
        start, rest = prompt, header.removeprefix(prompt.rstrip())
        if re.match(r"\s*</\w+>", rest):  # earlier messages close the thought that it opens
            start = re.sub(r"<\w+>\s*$", "", prompt)
        return (prompt[len(start) :], header[len(start) :]) if header.startswith(start) else None

    def begun(self, messages: Sequence[Message]) -> str:
        """Return the text that the policy's message after these ones has already begun with."""
        if messages and messages[-1].role == "assistant":
            return messages[-1].content
        opened = self.generation_prompt[0] if self.generation_prompt else ""
        return opened if opened.strip() and not EMPTY_THOUGHT.search(opened) else ""

    def following(self, text: str) -> list[int]:
        """Return the ids of what the policy says: special tokens in it stand for themselves."""
        return encode(self.tokenizer, text, follows=True)

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Decode a message of the policy, or what follows the tokens `before`.

        Tokens with a name, such as those of end of sequence and padding, are left out, and all
        special ones with actors.skip_special_tokens.
        """
        hidden = {*self.hidden.values()}
        before, ids = ([i for i in part if i not in hidden] for part in (before, token_ids))
        start = len(self.decoded(before)) if before else 0
        return self.decoded([*before, *ids])[start:]

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Decode tokens with all special ones among them."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def written(self, messages: Sequence[Message], *, reply: bool) -> str:
        """Write messages by the template, `reply` up to one of the policy; raise PromptRefused."""
        plain = [message.fields() for message in messages]
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

    def opened(self, messages: Sequence[Message]) -> str:
        """Write messages up to where the policy speaks, perhaps in a message that has begun."""
        if not messages or messages[-1].role != "assistant":
            return self.written(messages, reply=True)
        *others, begun = messages
        text = self.written(others, reply=True)
        if self.generation_prompt is None:
            raise PromptRefused(
                "the last message is the assistant's, and the chat template does not write "
                "messages after its generation prompt, so that the policy cannot go on with it; "
                "end the prompt with a message of another role"
            )
        opened, lacking = self.generation_prompt
        before = opened if EMPTY_THOUGHT.search(opened) else lacking
        thought = EMPTY_THOUGHT.search(before)
        if thought and begun.content.startswith(thought[1]):
            before = before[: thought.start()]
        return text.removesuffix(opened) + before + begun.content

    def text_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that begins a prompt: special tokens stand for themselves."""
        before, ids = self._before_texts, encode(self.tokenizer, text)
        return ids if before and ids[: len(before)] == before else [*before, *ids]

    def _joined_prompt(self, messages: Sequence[Message]) -> list[int]:
        before, text = self._before_texts, _joined(messages)
        ids = self.text_prompt(text)
        if self._as_written or not self.control.found(ids[len(before) :]):
            return ids
        text = text.removeprefix(self.decoded(before))
        return [*before, *self.control.encode(self.control.guard(text))]

    def _sample(self) -> str:
        """Write conversations of harmless messages, as far as the template takes their roles."""
        texts = []
        for messages in SAMPLES if self.templated else ():
            with suppress(PromptRefused):
                texts.append(self.written(messages, reply=False))
        return "".join(texts)

    def _after_reply(self, messages: Sequence[Message], *, reply: bool) -> str:
        """Return what the template writes after a message of the policy that others follow."""
        before = self.written([USER], reply=False)
        conversation = [USER, POLICY, *messages]
        goes_on = reply and messages
        whole = self.opened(conversation) if goes_on else self.written(conversation, reply=reply)
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


def renderer_for(tokenizer: Any, config: ActorsConfig) -> Renderer:
    """Return the renderer of a recipe's prompts; raise InputError as it does."""
    return Renderer(
        tokenizer,
        config.chat_template,
        config.chat_template_options,
        skip_special_tokens=config.skip_special_tokens,
    )


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message.content for message in messages)
