"""Texts to token ids, by a tokenizer of transformers, without special tokens around them."""

from typing import Any

from actors.errors import PromptRefused
from actors.foreign_text import surrogate


def encode(
    tokenizer: Any, text: str, *, follows: bool = False, split_special_tokens: bool = False
) -> list[int]:
    """Encode a text; raise PromptRefused for a character without a token.

    Lone surrogates have none anywhere. A tokenizer with a separate token for unknown characters has
    one for every other character. A text that `follows` another gets no space of the tokenizer's
    before it. With `split_special_tokens`, texts of special tokens are texts like any other.
    """
    if problem := surrogate(text):
        raise PromptRefused(f"the text has {problem}, which no tokenizer takes: {text[:80]!a}")
    options = {"split_special_tokens": True} if split_special_tokens else {}
    ids = _encode(tokenizer, text, options)
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown == tokenizer.pad_token_id and unknown in ids:
        character = next((c for c in text if unknown in _encode(tokenizer, c, options)), None)
        if character is not None:
            raise PromptRefused(
                f"the tokenizer has no token for {character!r} in {text[:80]!r}, and would write "
                "it as padding; leave it out, or add it to model.tiny.characters of a tiny model"
            )
    if follows and _after_newline(tokenizer, "0", {}) != _encode(tokenizer, "0", {}):
        return _after_newline(tokenizer, text, options)
    return ids


def before_texts(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer itself puts before a text, such as BOS."""
    text = "0" if _encode(tokenizer, "0", {}) else tokenizer.eos_token  # some have no digits
    plain, full = _encode(tokenizer, text, {}), tokenizer.encode(text, add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _encode(tokenizer: Any, text: str, options: dict[str, bool]) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, **options)
    return ids


def _after_newline(tokenizer: Any, text: str, options: dict[str, bool]) -> list[int]:
    """Encode a text as after a line break, which keeps a tokenizer from putting a space before."""
    before, whole = _encode(tokenizer, "\n", options), _encode(tokenizer, f"\n{text}", options)
    merged = whole[: len(before)] != before
    return _encode(tokenizer, text, options) if merged else whole[len(before) :]
