"""Tells the control tokens that a chat template writes from texts in messages that read like them.

In a message the text of a control token, such as <|im_end|>, is replaced by a private character
before the template writes the message. Control tokens in what it writes are then the template's,
and a stretch of text with such a character is encoded as text.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from actors.errors import PromptRefused
from actors.rollout.text_encoding import encode

GUARDS = 0xF0000
"""Code point of the first private character that stands for a control token's text."""
EDGE = "\U000ffffd"
"""Private character where a message may form a control token with the text beside it."""


class ControlTokens:
    """The control tokens of a tokenizer: special ones, and what the template puts around messages.

    `sample` writes a conversation of harmless messages; some models have tokens there that are not
    special to their tokenizer, as <｜User｜> of DeepSeek.
    """

    def __init__(self, tokenizer: Any, sample: Callable[[], str]) -> None:
        self._tokenizer, self._sample = tokenizer, sample
        added = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._added = {text: added[text] for text in sorted(added, key=len, reverse=True)}
        self.special = {text: i for text, (i, token) in self._added.items() if token.special}
        """Ids of special tokens by their texts."""
        named = tokenizer.special_tokens_map.values()
        self.named = {text: i for text, i in self.special.items() if text in named}
        """Those of them that have a name, as BOS, EOS and padding have."""

    @cached_property
    def structure(self) -> dict[str, int]:
        """Ids of the tokens that the template puts around messages, by their texts.

        Line breaks and single characters are none of them, as added to the vocabulary of Gemma.
        """
        sample, texts = self._sample(), self._added
        return {text: texts[text][0] for text in texts if len(text.strip()) > 1 and text in sample}

    @cached_property
    def _ids(self) -> dict[str, int]:
        tokenizer, ids = self._tokenizer, self.special
        if len(ids) < len(self._added):
            ids = ids | self.structure
        if tokenizer.unk_token_id != tokenizer.pad_token_id:  # it stands for characters
            ids = {text: i for text, i in ids.items() if i != tokenizer.unk_token_id}
        return {text: ids[text] for text in self._added if text in ids}

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Matches a control token with the white space that belongs to it."""
        tokens = [(text, self._added[text][1]) for text in self._ids]
        parts = (r"\s*" * t.lstrip + re.escape(text) + r"\s*" * t.rstrip for text, t in tokens)
        return re.compile(f"({'|'.join(parts) or '(?!)'})")

    @cached_property
    def _guards(self) -> dict[str, str]:
        """The characters that stand for control tokens, by their texts."""
        return {text: chr(GUARDS + number) for number, text in enumerate(self._added)}

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The beginnings and the ends of the texts of control tokens."""
        cuts = [(token, n) for token in self._ids for n in range(1, len(token))]
        return tuple({token[:n] for token, n in cuts}), tuple({token[n:] for token, n in cuts})

    def guard(self, text: str, *, own: bool = False, last: bool = False) -> str:
        """Replace the texts of control tokens in a message, and mark parts of them at its edges.

        The policy's `own` messages may have </think>, and the `last` one of them other tags, and
        other special tokens than those around messages.
        """
        texts = {*self.named, *self.structure} if own and last else {*self._ids}
        if own:
            tag = re.compile(r"</?\w+>" if last else "</?think>")
            texts = {t for t in texts if t in self.special or not tag.fullmatch(t)}
        present = [re.escape(token) for token in self._added if token in texts and token in text]
        text = re.sub("|".join(present) or "(?!)", lambda match: self._guards[match[0]], text)
        inner, (beginnings, ends) = text.strip(), self._parts
        before, after = inner.startswith(ends), inner.endswith(beginnings)
        edged = f"{EDGE if before else ''}{inner}{EDGE if after else ''}"
        return text.replace(inner, edged) if inner else text

    def unguard(self, text: str) -> str:
        """Undo `guard`."""
        tokens = {ord(guard): token for token, guard in self._guards.items()}
        return text.translate(tokens | {ord(EDGE): ""})

    def written(self, text: str) -> list[int]:
        """Return the control tokens that a guarded text has, by their texts."""
        return [self._id(match) for match in self._pattern.findall(text)]

    def _id(self, match: str) -> int:
        return self._ids[match if match in self._ids else match.strip()]

    def found(self, token_ids: Sequence[int]) -> list[int]:
        """Return the control tokens among ids, in their order."""
        return [i for i in token_ids if i in self._numbers]

    def encode(self, guarded: str, *, follows: bool = False) -> list[int]:
        """Encode a guarded text, in which only what stands outside messages is a control token.

        Raises PromptRefused for a character without a token, or a text that the tokenizer cannot
        write without a control token. A text that `follows` another gets no space before it.
        """
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(guarded)):
            if number % 2:
                ids.append(self._id(piece))
            elif piece:
                ids += self._as_text(piece, follows=self._glued if ids else follows)
        return ids

    @cached_property
    def _glued(self) -> bool:
        """No space is put before a text that stands after a control token."""
        token, *_ = self._ids
        return encode(self._tokenizer, f"{token}0")[1:] != encode(self._tokenizer, "0")

    def _as_text(self, guarded: str, *, follows: bool) -> list[int]:
        """Encode a text without control tokens: whole, or else those texts letter by letter."""
        text = self.unguard(guarded)
        ids = encode(self._tokenizer, text, follows=follows, split_special_tokens=True)
        if not self.found(ids):
            return ids
        ids = []
        for run in re.findall(r"[\U000f0000-\U000ffffd]|[^\U000f0000-\U000ffffd]+", guarded):
            token = self.unguard(run)
            for part in [run] if token == run else token:
                after = bool(ids) or follows
                ids += encode(self._tokenizer, part, follows=after, split_special_tokens=True)
        if self.found(ids):
            raise PromptRefused(
                f"the tokenizer cannot write {text[:80]!r} without the control tokens whose texts "
                "it has; leave them out"
            )
        return ids
