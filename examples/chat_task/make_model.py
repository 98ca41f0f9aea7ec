"""Write a chat model with random weights: `python make_model.py` makes the folder `model`.

A Qwen3 of 0.3 million parameters with a token for each character and the ChatML template. A real
task takes `model.path = "Qwen/Qwen2.5-1.5B-Instruct"` or another chat model instead.
"""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 128


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each letter, space and newline, and a chat template."""
    tokens = [*SPECIAL, *string.ascii_lowercase, " ", "\n"]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def main() -> None:
    """Write the model folder."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained("model")
    tokenizer.save_pretrained("model")


if __name__ == "__main__":
    main()
