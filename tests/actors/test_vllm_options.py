"""Options that go to vLLM by its own names, and those that Headway keeps to itself."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec
from actors.engines.vllm_arguments import plain_arguments
from actors.vllm_options import PASSED_ON, SET_BY
from deploy.config.loader import load_recipe
from deploy.errors import InputError
from weight_sync.config import WeightSyncConfig


def names_in_vllm():
    """Return the fields of vLLM's EngineArgs, read without importing it."""
    file = Path(find_spec("vllm").submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (arguments,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    return {field.target.id for field in arguments.body if isinstance(field, ast.AnnAssign)}


def arguments_of(initial_version=None, **options):
    return plain_arguments(
        EngineSpec(
            index=0,
            config=ActorsConfig(dtype="float32", **options),
            weight_sync=WeightSyncConfig(),
            model_path="model",
            seed=0,
            initial_version=initial_version,
        ),
        max_model_len=8,
    )


def test_every_option_that_is_passed_on_or_set_by_a_key_is_one_of_vllm():
    assert names_in_vllm() >= PASSED_ON | SET_BY.keys()


def test_no_option_that_headway_sets_is_passed_on():
    assert not PASSED_ON & arguments_of(tensor_parallel_size=2, float32_head=True).keys()
    assert not PASSED_ON & SET_BY.keys()


def test_options_reach_vllm_as_they_are_given():
    given = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192}
    arguments = arguments_of(vllm_options=given)
    assert {name: arguments[name] for name in given} == given


def test_an_engine_that_serves_the_weights_of_its_folder_loads_them():
    given = {"load_format": "dummy"}
    assert arguments_of(vllm_options=given)["load_format"] == "dummy"
    assert "load_format" not in arguments_of(initial_version=0, vllm_options=given)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("max_num_seqs=4", "max_num_seqs: set actors.max_concurrent_rollouts instead"),
        ("quantization='fp8'", "quantization: not passed on, since"),
        ("speculative_config={}", "speculative_config: not passed on, since"),
        ("logits_processors=[]", "logits_processors: not passed on, since"),
        ("kv_cache_dtyp='fp8'", "did you mean 'kv_cache_dtype'?"),
    ],
)
def test_options_that_are_not_passed_on_are_refused_by_name(option, message):
    with pytest.raises(InputError) as caught:
        load_recipe("demo", [f"actors.vllm_options={{{option}}}"])
    assert message in str(caught.value)
    assert "actors.vllm_options" in str(caught.value)


def test_options_of_vllm_have_no_place_with_another_engine():
    settings = ["actors.engine=scripted", "actors.vllm_options={load_format='dummy'}"]
    with pytest.raises(InputError, match=r"vllm_options has no effect with actors\.engine"):
        load_recipe("demo", settings)
