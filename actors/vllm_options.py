"""Options of vLLM that a recipe may set by vLLM's own names, in `actors.vllm_options`.

An option is on the list if it decides how fast and in which memory vLLM computes, and changes
neither what is sampled, unknown to the learner, nor the form of the weights, which are updated in
place. Types of the KV cache round: `mismatch` in the metrics shows by how much.
"""

from typing import Any

from headway.nearest_name import nearest

SET_BY = {
    "model": "model.path",
    "dtype": "actors.dtype",
    "seed": "seed",
    "max_model_len": "actors.max_model_len",
    "max_num_seqs": "actors.max_concurrent_rollouts",
    "gpu_memory_utilization": "actors.gpu_memory_utilization",
    "kv_cache_memory_bytes": "actors.kv_cache_gib",
    "tensor_parallel_size": "actors.tensor_parallel_size",
    "enforce_eager": "actors.enforce_eager",
    "disable_log_stats": "deploy.engine_metrics",
    "weight_transfer_config": "weight_sync.transport",
    "n": "prompts.group_size",
    "stop_token_ids": "actors.stop",
    "include_stop_str_in_output": "actors.include_stop",
}
"""Options that a key of the recipe sets."""

_PASSED_ON = """
    max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold
    enable_chunked_prefill async_scheduling scheduler_reserve_full_isl
    kv_cache_dtype kv_cache_dtype_skip_layers enable_prefix_caching prefix_caching_hash_algo
    num_gpu_blocks_override disable_hybrid_kv_cache_manager kv_offloading_size kv_offloading_backend
    attention_backend attention_config compilation_config optimization_level performance_mode
    cudagraph_capture_sizes max_cudagraph_capture_size disable_cascade_attn linear_backend
    disable_custom_all_reduce kernel_config enable_flashinfer_autotune
    enable_expert_parallel moe_backend all2all_backend expert_placement_strategy
    load_format safetensors_load_strategy max_parallel_loading_workers
"""
PASSED_ON = frozenset(_PASSED_ON.split())
"""Options that vLLM gets as they are given: of batches, KV cache, kernels, experts and loading."""
_BY_REASON = {
    "an engine is one group of actors.tensor_parallel_size workers; set actors.count for more": (
        "pipeline_parallel_size data_parallel_size prefill_context_parallel_size"
        " decode_context_parallel_size"
    ),
    "a new version replaces the weights in the form in which they are trained": (
        "quantization cpu_offload_gb"
    ),
    "vLLM loads experts where they were at first, not where it has moved them": (
        "enable_eplb eplb_config"
    ),
    "a draft model would stay at its first version, and drafted tokens were not checked": (
        "speculative_config"
    ),
    "the learner would not know the probabilities that tokens are sampled with": (
        "logits_processors logprobs_mode generation_config override_generation_config hf_overrides"
        " min_p typical_p repetition_penalty presence_penalty frequency_penalty length_penalty"
        " no_repeat_ngram_size logit_bias bad_words bad_words_ids allowed_token_ids min_tokens"
        " ignore_eos"
    ),
    "adapters are those of learner.lora, which engines merge": "enable_lora",
    "code of model folders is never loaded": "trust_remote_code",
}
REFUSED = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Options that some would set, with the reasons why vLLM does not get them."""


def advice_on(name: str) -> str | None:
    """Return what to do about an option of vLLM that is not passed on by its name; else None."""
    if key := SET_BY.get(name):
        return f"set {key} instead"
    reason = REFUSED.get(name)
    return reason and f"not passed on, since {reason}"


def check_vllm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options; raise ValueError for one that is not passed on, with what to do."""
    for name in options:
        if advice := advice_on(name):
            raise ValueError(f"{name}: {advice}")
        if name not in PASSED_ON:
            raise ValueError(
                f"{name}: not passed on, since vLLM has no such option, or Headway sets it; must "
                f"be one of {', '.join(sorted(PASSED_ON))}{nearest(name, PASSED_ON)}"
            )
    return options
