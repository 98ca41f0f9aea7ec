"""Tiny models of the families whose fused and tied weights a loader has to get right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.weight_sync.conftest import Sender
from weight_sync.adapter import AdapterForm
from weight_sync.receive.staging import StagedWeights, stage
from weight_sync.transports.shared_memory import SharedMemoryTransport

VOCABULARY = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, biases and tied": ("Qwen2", {"tie_word_embeddings": True}),
    "llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "gemma, norms that add one, tied": ("Gemma", {"tie_word_embeddings": True}),
    "qwen3, norms of queries and keys, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", {"tie_word_embeddings": False} | _EXPERTS),
}
"""Transformers' class and settings, by what is special about them."""


def build(family: str, folder: Path, **sizes: int) -> Any:
    """One of `FAMILIES` in memory and on disk, with a tokenizer that never ends a sequence.

    Its sizes are tiny but for those given.
    """
    import transformers
    from tokenizers import Tokenizer, models

    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(_SIZES | settings | sizes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    model.save_pretrained(folder)
    words = {str(token): token for token in range(VOCABULARY)} | {"<eos>": VOCABULARY}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), eos_token="<eos>"
    ).save_pretrained(folder)
    return model


def named_as_in_the_folder(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model under the names of its folder."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return revert_weight_conversion(model, weights)


def expected_logprobs(model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of tokens after a prompt, by a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


@contextmanager
def staged(
    version: int, tensors: dict[str, torch.Tensor], adapter: AdapterForm | None = None
) -> Iterator[StagedWeights]:
    """Publish and stage a version, which is held until the end of the block."""
    transport = SharedMemoryTransport()
    with Sender(transport, 65536) as publisher:
        held = stage(publisher.send(version, tensors, adapter), transport)
    yield held
    held.close()
