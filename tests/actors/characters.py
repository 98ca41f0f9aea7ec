"""A tokenizer with one token per character, with or without a chat template; and a model folder."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.ascii_lowercase + string.digits + "=+-,:;|/ \n"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def character_tokenizer(template=None):
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        chat_template=template,
    )
