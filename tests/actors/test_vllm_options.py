"""Options that go to vLLM by its own names, and those that Headway keeps to itself."""

import ast
import json
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
from fakes import engine_spec
from transformers import GenerationConfig

from actors.engines.vllm_arguments import plain_arguments
from actors.vllm_options import PASSED_ON, REFUSED, SET_BY
from deploy.config.loader import load_recipe
from headway.errors import InputError


def names_in_vllm(file, name):
    """Return the fields of a class of vLLM, read without importing it."""
    path = Path(find_spec("vllm").submodule_search_locations[0]) / file
    (fields,) = (
        node.body
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {field.target.id for field in fields if isinstance(field, ast.AnnAssign)}


def arguments_of(initial_version=None, **options):
    return plain_arguments(engine_spec(version=initial_version, dtype="float32", **options), 8)


def test_every_option_that_is_passed_on_or_set_by_a_key_is_one_of_vllm_or_of_sampling():
    engine = names_in_vllm("engine/arg_utils.py", "EngineArgs")
    sampling = (
        names_in_vllm("sampling_params.py", "SamplingParams") | vars(GenerationConfig()).keys()
    )
    assert engine >= PASSED_ON
    assert engine | sampling >= SET_BY.keys() | REFUSED.keys()


def test_no_option_that_headway_sets_is_passed_on():
    assert not PASSED_ON & arguments_of(tensor_parallel_size=2, float32_head=True).keys()
    assert not PASSED_ON & (SET_BY.keys() | REFUSED.keys())


def test_options_reach_vllm_as_they_are_given():
    given = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192}
    arguments = arguments_of(vllm_options=given)
    assert {name: arguments[name] for name in given} == given


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 512, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("option", "value", "where"),
    [
        ("kv_cache_dtype", "fp8", "cache_config.cache_dtype"),
        ("enable_prefix_caching", False, "cache_config.enable_prefix_caching"),
        ("num_gpu_blocks_override", 512, "cache_config.num_gpu_blocks_override"),
        ("max_num_batched_tokens", 4096, "scheduler_config.max_num_batched_tokens"),
        ("long_prefill_token_threshold", 4, "scheduler_config.long_prefill_token_threshold"),
        ("async_scheduling", False, "scheduler_config.async_scheduling"),
        ("attention_backend", "FLASH_ATTN", "attention_config.backend.name"),
        ("optimization_level", 1, "optimization_level"),
        ("disable_custom_all_reduce", True, "parallel_config.disable_custom_all_reduce"),
        ("enable_expert_parallel", True, "parallel_config.enable_expert_parallel"),
        ("moe_backend", "triton", "kernel_config.moe_backend"),
        ("load_format", "dummy", "load_config.load_format"),
    ],
)
def test_an_option_that_is_passed_on_is_in_the_settings_of_vllm(tmp_path, option, value, where):
    from vllm.engine.arg_utils import AsyncEngineArgs

    (tmp_path / "config.json").write_text(json.dumps(MOE))
    arguments = arguments_of(enforce_eager=False, vllm_options={option: value})
    del arguments["worker_extension_cls"]
    arguments |= {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    settings = AsyncEngineArgs(**arguments).create_engine_config()
    assert attrgetter(where)(settings) == value


def test_an_engine_that_serves_the_weights_of_its_folder_loads_them():
    given = {"load_format": "dummy"}
    assert arguments_of(vllm_options=given)["load_format"] == "dummy"
    assert "load_format" not in arguments_of(initial_version=0, vllm_options=given)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("max_num_seqs=4", "max_num_seqs: set actors.max_concurrent_rollouts instead"),
        ("tensor_parallel_size=2", "tensor_parallel_size: set actors.tensor_parallel_size instead"),
        ("pipeline_parallel_size=2", "not passed on, since an engine is one group of"),
        ("data_parallel_size=2", "not passed on, since an engine is one group of"),
        ("quantization='fp8'", "quantization: not passed on, since a new version replaces"),
        ("cpu_offload_gb=4", "not passed on, since a new version replaces the weights in"),
        ("enable_eplb=true", "not passed on, since vLLM loads experts where they were at first"),
        ("speculative_config={}", "speculative_config: not passed on, since a draft model"),
        ("logits_processors=[]", "not passed on, since the learner would not know"),
        ("hf_overrides={}", "not passed on, since the learner would not know"),
        ("enable_lora=true", "not passed on, since adapters are those of learner.lora"),
        ("trust_remote_code=true", "not passed on, since code of model folders is never"),
        ("worker_cls='mine'", "since vLLM has no such option, or Headway sets it; must be one of"),
        ("kv_cache_dtyp='fp8'", "did you mean 'kv_cache_dtype'?"),
    ],
)
def test_options_that_are_not_passed_on_are_refused_by_name(option, message):
    with pytest.raises(InputError) as caught:
        load_recipe("demo", [f"actors.vllm_options={{{option}}}"])
    assert message in str(caught.value)
    assert "actors.vllm_options" in str(caught.value)
