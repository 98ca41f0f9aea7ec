"""Tiny models of many architectures of transformers, with random weights and large logits."""

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

WINDOW = 8

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "init_std": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ALL = {"sliding_window": WINDOW}
SOME = {**ALL, "layer_types": ["sliding_attention", "full_attention"]}
HEAD = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATE = {
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64,
    "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
GEMMA_4 = {
    **HEAD, **SOME, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
}  # fmt: skip
LLAMA_4 = {
    **HEAD, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW,
    "floor_scale": 4, "no_rope_layers": [1, 0], "num_experts_per_tok": 1, "moe_layers": [1],
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8, "num_channels": 3, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip


def seen(text_type: str, text: dict[str, Any], vision_type: str, **more: Any) -> dict[str, Any]:
    """Return settings of a multimodal model, with those of its language model in `text_config`."""
    return {
        "text_config": {**BASE, **HEAD, "model_type": text_type, **text},
        "vision_config": {**VISION, "model_type": vision_type, **more.pop("vision", {})},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


GEMMA_4_VISION = {"pooling_kernel_size": 1, "position_embedding_size": 16}
LONGROPE = rope(
    "longrope", factor=8.0, original_max_position_embeddings=16,
    short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0],
)  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, rope llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama, rope linear": rope("linear", factor=4.0),
    "llama, rope yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "llama, rope dynamic": rope("dynamic", factor=4.0),
    "llama, rope longrope": LONGROPE,
    "mistral, window": ALL,
    "ministral, some windows": {**HEAD, **SOME},
    "qwen2": {},
    "qwen2, some windows": {**ALL, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": {**HEAD, **SOME, "query_pre_attn_scalar": 8},
    "gemma3_text, some windows": {**HEAD, **SOME},
    "gemma4_text, some windows": GEMMA_4,
    "olmo2": {},
    "olmo3, some windows": SOME,
    "phi": {},
    "phi3, window": ALL,
    "phi3, rope longrope": {**LONGROPE, "original_max_position_embeddings": 16},
    "gpt2": {},
    "gpt_neo, local layers": {
        "attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_layers": 2,
        "num_heads": 4,
    },
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "falcon": {},
    "xglm": {"d_model": 32, "num_layers": 2, "ffn_dim": 48, "attention_heads": 4},
    "biogpt": {},
    "starcoder2, window": ALL,
    "stablelm": {},
    "cohere": {},
    "cohere2, some windows": {**HEAD, **SOME, "logit_scale": 1.0},
    "granite": {},
    "granite, scaled logits": {"logits_scaling": 4.0},
    "nanochat": {},
    "minicpm3": LATENT,
    "glm4": HEAD,
    "exaone4, some windows": SOME,
    "smollm3": {},
    "modernbert-decoder": {"local_attention": WINDOW},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**HEAD, **EXPERTS},
    "olmoe": EXPERTS,
    "phimoe": EXPERTS,
    "granitemoe": EXPERTS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {**HEAD, **ROUTED},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
    },
    "gpt_oss, some windows": {**HEAD, **EXPERTS, **SOME},
    "llama4_text, chunks": LLAMA_4,
    "mamba": {"state_size": 8},
    "jamba": {**EXPERTS, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW, "num_hidden_layers": 3},
    "qwen3_next": {**HEAD, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "gemma3, some windows": seen("gemma3_text", SOME, "siglip_vision_model", mm_tokens_per_image=1),
    "gemma4, some windows": seen(
        "gemma4_text", GEMMA_4, "gemma4_vision", vision=GEMMA_4_VISION, audio_config=None
    ),
    "gemma4, capped logits": seen(
        "gemma4_text", {**GEMMA_4, "final_logit_softcapping": 3.0}, "gemma4_vision",
        vision=GEMMA_4_VISION, audio_config=None,
    ),
    "mistral3, window": seen("mistral", ALL, "pixtral"),
    "llava": seen("llama", {}, "clip_vision_model"),
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True, "max_position_embeddings": 130},
    "arcee": {},
    "apertus": {},
    "olmo": {},
    "helium": HEAD,
    "nemotron": {},
    "glm": HEAD,
    "seed_oss": HEAD,
    "persimmon": {},
    "gpt_bigcode": {},
    "codegen": {"rotary_dim": 4},
    "gpt_neox_japanese": {},
    "openai-gpt": {},
    "diffllama": {},
    "ernie4_5": HEAD,
    "hunyuan_v1_dense": HEAD,
    "ministral3, window": {**HEAD, **ALL},
    "vaultgemma, some windows": {**HEAD, **SOME, "query_pre_attn_scalar": 8},
    "gemma3n_text, some windows": {
        **HEAD, "sliding_window": WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": 2 * ["sliding_attention", "full_attention"], "laurel_rank": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text, shared keys": {
        **GEMMA_4, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
    },
    "granite_swa, some windows": SOME,
    "mimo_v2_flash, some windows": {**HEAD, **ROUTED, **SOME, "v_head_dim": 8},
    "hunyuan_v1_moe": {**HEAD, **EXPERTS, "moe_topk": 2},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 16},
    "flex_olmo": EXPERTS,
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "dots1": {**HEAD, **ROUTED},
    "glm4_moe_lite": {**LATENT, "head_dim": 8},
    "minimax_m2": {**HEAD, **EXPERTS},
    "exaone_moe, some windows": {**HEAD, **EXPERTS, **SOME},
    "hy_v3": {**HEAD, **EXPERTS},
    "afmoe, some windows": {**HEAD, **EXPERTS, **SOME, "num_shared_experts": 1},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "moe_topk": 2, "zero_expert_num": 2, "head_dim": 8,
        "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48,
    },
    "deepseek_v32, chosen tokens": {
        **LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16, "head_dim": 8,
    },
    "glm_moe_dsa, chosen tokens": {
        **LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16, "head_dim": 8,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8},
    "bamba": {**STATE, "attn_layer_indices": [1]},
    "falcon_h1": {**HEAD, **STATE, "lm_head_multiplier": 0.5},
    "granitemoehybrid": {
        **EXPERTS, **STATE, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        **HEAD, **ROUTED, "layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 8,
        "num_hidden_layers": 3, "moe_shared_expert_intermediate_size": 16,
    },
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8, "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"], "adapter_rank": 4,
    },
    "qwen3_5_text": {**HEAD, **LINEAR},
    "qwen3_5_moe_text": {
        **HEAD, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": LINEAR,
    "minimax": {
        **HEAD, **EXPERTS, "block_size": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {
        **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    },
    "bart": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    },
}  # fmt: skip
"""Settings by the model type, and what is special about them."""
CONVERTED: dict[str, dict[str, Any]] = {
    "hrm_text": HEAD,
    "minimax_m2": {**HEAD, **EXPERTS},
    "exaone_moe": {**HEAD, **SOME, **EXPERTS},
    "hy_v3": {**HEAD, **EXPERTS},
    "kimi_linear": {**LATENT, **EXPERTS},
    "laguna": {**HEAD, **EXPERTS},
    "afmoe": {**HEAD, **EXPERTS, "layer_types": SOME["layer_types"]},
}
"""Further ones, whose folders have other tensors, or others' names, than transformers in memory."""


def configuration(name: str) -> PreTrainedConfig:
    settings = (ARCHITECTURES | CONVERTED)[name]
    settings = settings if "text_config" in settings else {**BASE, **settings}
    return CONFIG_MAPPING[name.split(",")[0]](**settings)


def kind_of(config: PreTrainedConfig) -> Any:
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def write(name: str, folder: str, config: PreTrainedConfig | None = None) -> None:
    """Write a model of the architecture, of the same weights each time."""
    config = config or configuration(name)
    torch.manual_seed(0)
    model = kind_of(config).from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # 0 at first, as if there were none
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
