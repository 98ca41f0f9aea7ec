"""Settings that are refused, and that are taken."""

import pytest
from fakes import engine_spec
from pydantic import ValidationError

from actors.config import ActorsConfig, HeldoutConfig, PromptsConfig
from actors.engines.vllm_arguments import plain_arguments


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (ActorsConfig, {"temprature": 1.0}, "temprature"),
        (ActorsConfig, {"temperature": 0.0}, "greater than or equal to 0.01"),
        (ActorsConfig, {"reward": ["exact"]}, "exact_match, last_answer, numeric_match"),
        (ActorsConfig, {"reward": []}, "at least one"),
        (ActorsConfig, {"environment": "tools", "reward": []}, "at least one"),
        (ActorsConfig, {"reward": ["exact_match", "exact_match"]}, "no reward twice"),
        (ActorsConfig, {"environment": "tool"}, "single_turn, tools"),
        (ActorsConfig, {"top_k": 0}, "-1 is no limit"),
        (ActorsConfig, {"count": 2, "cores": ["0"]}, "1 entries for actors.count = 2"),
        (ActorsConfig, {"count": 2, "min_count": 3}, "3 must be at most actors.count = 2"),
        (ActorsConfig, {"cores": ["all"]}, "cores.0"),
        (ActorsConfig, {"cores": ["0-"]}, "cores.0"),
        (ActorsConfig, {"gpus": 1, "tensor_parallel_size": 2}, "gpus = 1 must equal .* = 2"),
        (ActorsConfig, {"gpus": 1.5}, "gpus = 1.5 must equal .* = 1"),
        (ActorsConfig, {"max_model_len": 64, "max_new_tokens": 64}, "the prompt needs space too"),
        (ActorsConfig, {"overlong": {"buffer": 65}}, "buffer = 65 must be at most .* = 64"),
        (ActorsConfig, {"overlong": {"buffer": 0}}, "greater than or equal to 1"),
        (ActorsConfig, {"overlong": {"buffer": 8, "factor": 0}}, "greater than 0"),
        (ActorsConfig, {"overlong": {}}, "give either buffer, in tokens, or share"),
        (ActorsConfig, {"missing_eos_penalty": -1}, "greater than or equal to 0"),
        (ActorsConfig, {"scripted_options": {"median_length": 3}}, "no effect"),
        (
            ActorsConfig,
            {"engine": "scripted", "vllm_options": {"load_format": "dummy"}},
            r"vllm_options has no effect with actors\.engine",
        ),
        (ActorsConfig, {"include_stop": True}, r"no effect without actors\.stop"),
        *(
            (ActorsConfig, {"stop": stop}, "stop")
            for stop in ([""], [-1], [True], [1.5], "x", [None])
        ),
        (PromptsConfig, {"source": "file"}, "files, datasets:NAME, mixture, lettered_chain_sum"),
        (PromptsConfig, {"source": "files", "group_size": 0}, "greater than or equal to 1"),
        (PromptsConfig, {"source": "files", "pass_rate_cap": 0}, "greater than 0"),
        (PromptsConfig, {"source": "files", "pass_rate_cap": 1.1}, "less than or equal to 1"),
        (HeldoutConfig, {"source": "my_module:"}, 'or a path "module:Class"'),
        (HeldoutConfig, {"size": 0}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_is_allowed(section, settings, message):
    with pytest.raises(ValidationError, match=message):
        section(**settings)


def test_dotted_paths_and_known_names_are_accepted():
    config = ActorsConfig(reward=["math_verify", "my_module:score"], environment="my_module:World")
    assert config.reward == ("math_verify", "my_module:score")
    assert ActorsConfig(cores=["0,2-5"]).cores == ("0,2-5",)
    assert ActorsConfig(gpus=2, tensor_parallel_size=2).gpus == 2
    assert ActorsConfig(tensor_parallel_size=2).gpus == 0
    assert PromptsConfig(source="reasoning_gym:chain_sum").group_size == 8
    assert HeldoutConfig().source is None
    assert ActorsConfig(reward=[], environment="my_module:World").reward == ()


def test_the_workers_of_an_engine_are_its_own_processes_also_in_a_placement_group():
    alone, two = (
        plain_arguments(engine_spec(dtype="float32", tensor_parallel_size=workers), 8)
        for workers in (1, 2)
    )
    assert "distributed_executor_backend" not in alone
    assert two["distributed_executor_backend"] == "mp"
