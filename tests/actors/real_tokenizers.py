"""Real vocabularies with chat templates in the formats of four families, from what is installed.

The vocabularies are those of Mistral 7B (sentencepiece) and of Mistral Nemo (byte-level BPE, its
first 20,000 tokens), which the package mistral_common carries; the special tokens are those that
each template writes. The templates, in `chat_templates`, are written for these tests after the
formats that the makers of Qwen3, Llama 3, Mistral and Gemma describe; of Qwen3's, tool schemas are
left out. Line breaks are tokens of their own to Gemma.
"""

import base64
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import mistral_common
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

DATA = Path(mistral_common.__file__).parent / "data"
TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENS = 20_000
SPECIAL = {
    "qwen3": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>", "<tool_response>"]),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"],
    ),
    "gemma": ("<bos>", "<end_of_turn>", ["<start_of_turn>", "<eos>"]),
}
"""Begin of text, end of a turn, and others."""


@cache
def real_tokenizer(name):
    template = (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")
    if name == "mistral":
        tokenizer = _sentencepiece("mistral_instruct_tokenizer_240323.model.v3")
    else:
        bos, eos, others = SPECIAL[name]
        tokenizer = _sentencepiece("tokenizer.model.v1") if name == "gemma" else byte_level()
        tokenizer.add_special_tokens(
            {"bos_token": bos, "eos_token": eos, "additional_special_tokens": others}
        )
    if name == "gemma":
        breaks = [AddedToken("\n" * count, special=False, normalized=False) for count in (1, 2)]
        tokenizer.add_tokens(breaks)
    tokenizer.chat_template = template
    return tokenizer


def _sentencepiece(file):
    folder = Path(tempfile.mkdtemp())
    shutil.copy(DATA / file, folder / "tokenizer.model")
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    shutil.rmtree(folder)
    return tokenizer


def byte_level():
    stored = json.loads((DATA / "tekken_240718.json").read_text())
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in stored["vocab"][:TOKENS]}
    letters = bytes_to_unicode()

    def written(token):
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, written(a), written(b)) for _, _, a, b in sorted(known)]
    merges.sort(key=lambda merge: merge[0])
    bpe = models.BPE(
        {written(token): rank for token, rank in ranks.items()},
        [(left, right) for _, left, right in merges],
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(stored["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
