"""The tokenizer of a tiny model: one token per character. Imports no torch."""

from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")


def vocabulary_of(characters: str) -> dict[str, int]:
    """Return the ids of the special tokens and of each character, by their text."""
    return {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}


def tiny_tokenizer(characters: str, context: int) -> Any:
    """Return a tokenizer of transformers; characters that it lacks become <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary_of(characters), unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<pad>",
        model_max_length=context,
    )
