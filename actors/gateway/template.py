"""Chats to token ids: whole ones, and what follows a message that the policy has sampled."""

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.errors import PromptRefused
from actors.gateway.messages import ChatMessage
from actors.rollout.chat_rendering import PLACEHOLDER, Renderer, read_by
from headway.errors import InputError

Tools = Sequence[Mapping[str, Any]]
LAST_PLACEHOLDER = "\uf8ff"


class ChatTemplate:
    """The chat template of a model, with the options of the recipe; a request may add its own.

    `end_ids` are the tokens at which the engine stops, which a template may end no message with.
    Texts of control tokens in messages stay text, as in `Renderer`. A message of the assistant at
    the end of a chat is one that the policy goes on with.
    """

    def __init__(self, renderer: Renderer, end_ids: Collection[int] = ()) -> None:
        self._renderer = renderer
        self._ends = {*renderer.turn_end_ids, renderer.tokenizer.eos_token_id, *end_ids}
        call = inspect.signature(renderer.tokenizer.apply_chat_template)
        self._reserved = call.parameters.keys() - {"documents"}

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Tools | None, options: Mapping[str, Any]
    ) -> list[int]:
        """Return the ids of a whole chat.

        Raises PromptRefused for what the template cannot write, an option that is not the
        template's, or a text of a control token in tools.
        """
        return self._given(tools, options).prompt(messages)

    def following(
        self,
        messages: Sequence[ChatMessage],
        known: int,
        tools: Tools | None,
        options: Mapping[str, Any],
        last: int,
    ) -> list[int] | None:
        """Return the ids to append to those that end with message `known` − 1, the policy's.

        `last` is the last of those ids; a message that it ends is not ended once more. None where
        the template rewrites what stands before: a chat that goes on by answers of tools alone
        always goes on from what was sampled, but once another message follows, a template may put
        the tools elsewhere, or leave out earlier thoughts, as Qwen3's does. What the model then
        reads is another history, and so a further segment of the rollout.
        """
        renderer, others = self._given(tools, options), messages[known:]
        if not renderer.templated:
            return renderer.continuation(others, last)
        mark = _unused(messages)
        answer, marked = messages[known - 1], [*messages]
        marked[known - 1] = replace(answer, content=f"{answer.content}{mark}")

        def after(written: Sequence[Any]) -> str:
            whole = renderer.opened(written)
            if not answer.calls:
                return _after(whole, mark)
            alone = renderer.written(written[:known], reply=False)
            if mark in whole and mark in alone:
                whole, alone = _after(whole, mark), _after(alone, mark)
            end = renderer.turn_end()
            if not (whole.startswith(alone) and alone.endswith(end)):
                raise InputError("the chat template rewrites a call of a tool")
            return whole[len(alone) - len(end) :]

        try:
            if any(m.role != "tool" for m in others) and _rewritten(renderer, marked, known, mark):
                return None
            ids = renderer.encoded(after, marked)
        except (InputError, PromptRefused):
            return None
        return ids[1:] if ids[:1] == [last] or self._ends >= {last, *ids[:1]} else ids

    def ends(self, token_id: int) -> bool:
        """Return whether a token ends messages of the policy."""
        return token_id in self._ends

    def text_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is a whole prompt: control tokens stand for themselves."""
        return self._renderer.text_prompt(text)

    def text_after(self, text: str, last: int) -> list[int]:
        """Return the ids of a text after the token `last`, which is not repeated."""
        ids = self._renderer.following(text)
        return ids[1:] if ids[:1] == [last] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, with all special ones."""
        return self._renderer.decoded(token_ids)

    def plain(self, token_ids: Sequence[int]) -> str:
        """Decode tokens without special ones, as answers are shown to agents."""
        special = self._renderer.control.special.values()
        return self._renderer.decoded([i for i in token_ids if i not in special])

    def _given(self, tools: Tools | None, options: Mapping[str, Any]) -> Renderer:
        """Return the renderer for a request; options that the template does not read are idle."""
        renderer = self._renderer
        if refused := sorted(options.keys() & self._reserved):
            raise PromptRefused(
                f"chat_template_kwargs names {', '.join(refused)}, which is not an option of the "
                "chat template; leave it out"
            )
        given = read_by(renderer.tokenizer, options) | ({"tools": [*tools]} if tools else {})
        if not renderer.templated or not given:
            return renderer
        text = json.dumps(given, ensure_ascii=False)
        if renderer.control.guard(text) != text:
            raise PromptRefused(
                "tools or chat_template_kwargs have the text of a control token, which the chat "
                f"template would write as one; leave it out of {text[:200]!r}"
            )
        return renderer.with_options(given)


def _unused(messages: Sequence[ChatMessage]) -> str:
    """Return a private character that is in no message."""
    texts = repr([message.fields() for message in messages])
    characters = map(chr, range(ord(PLACEHOLDER), ord(LAST_PLACEHOLDER)))
    return next(c for c in characters if c not in texts and ascii(c)[1:-1] not in texts)


def _after(whole: str, mark: str) -> str:
    if whole.count(mark) != 1:
        raise InputError("the chat template does not write the policy's message once")
    return whole.partition(mark)[2]


def _rewritten(renderer: Renderer, marked: Sequence[ChatMessage], known: int, mark: str) -> bool:
    """Return whether a template writes messages up to `known` otherwise once others follow."""
    whole, before = renderer.opened(marked), renderer.written(marked[: known - 1], reply=False)
    answer, shown = marked[known - 1], "".join(whole[len(before) :].split())
    parts = answer.reasoning, answer.content.removesuffix(mark)
    texts = ("".join(text.split()) for text in parts)
    return not whole.startswith(before) or any(text not in shown for text in texts)
