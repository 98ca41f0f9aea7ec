"""The form of adapters: which layers they change, and what a folder of PEFT's may say."""

import json

import pytest

from headway.errors import InputError
from learner.config.lora import CONFIG_FILE, LoraConfig, adapted_layers, check_form, stored_form

LINEAR = {"layers.0.attn.q_proj", "layers.0.mlp.up_proj"}
STORED = {
    "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"], "peft_type": "LORA", "bias": "none",
    "base_model_name_or_path": "/model",
}  # fmt: skip


def layers(targets, linear=LINEAR):
    return adapted_layers(LoraConfig(targets=targets), model="m", linear=linear, section="a.lora")


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", LINEAR),
        (["up_proj"], {"layers.0.mlp.up_proj"}),
        (["mlp.up_proj", "layers.0.attn.q_proj"], LINEAR),
        (r".*\.(q|k)_proj", {"layers.0.attn.q_proj"}),
    ],
)
def test_all_linear_layers_or_those_named_get_factors(targets, expected):
    assert layers(targets) == expected
    assert layers(targets, linear=None) == set(), "of a model that is not here"


def test_targets_that_are_no_regular_expression_are_refused():
    with pytest.raises(ValueError, match=r"'\(q_proj' is no regular expression: missing \)"):
        LoraConfig(targets="(q_proj")


@pytest.mark.parametrize(
    ("targets", "arguments", "message"),
    [
        (["q_proj", "wrong"], {}, r"^a.lora.targets = .*'m' has no linear layers wrong; .* are q_"),
        (["roj"], {}, "no linear layers roj; .* are q_proj, up_proj$"),
        ("up_proj", {}, "no linear layers that it matches; .* are q_proj, up_proj$"),
        ("all-linear", {"linear": set()}, "no linear layers at all; .* an adapter are none$"),
    ],
)
def test_a_model_without_such_layers_is_refused(targets, arguments, message):
    with pytest.raises(InputError, match=message):
        layers(targets, **arguments)


@pytest.fixture
def stored(tmp_path):
    """Return a function that reads the form of an adapter whose description has these changes."""

    def read(**changes):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({**STORED, **changes}))
        return stored_form(tmp_path)

    return read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, r"a.lora.path = '/x' has \{'rank': 4, .* and the recipe \{'rank': 8"),
        ({"alpha": 9.0}, "'alpha': 8.0.* and the recipe .*'alpha': 9.0"),
        ({"rslora": True}, "'rslora': False.* and the recipe .*'rslora': True"),
    ],
)
def test_another_rank_or_scale_than_the_folders_is_refused(stored, change, message):
    form, base = stored()
    assert base == "/model"
    wanted = form.model_copy(update={"path": "/x"})
    check_form(form, wanted, "a.lora")
    with pytest.raises(InputError, match=message):
        check_form(form, wanted.model_copy(update=change), "a.lora")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha_pattern", {"up_proj": 2}),
        ("rank_pattern", {"up_proj": 2}),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [3]),
        ("use_dora", True),
        ("init_lora_weights", "lora_ga"),
        ("alora_invocation_tokens", [1]),
        ("bias", "all"),
        ("peft_type", "LOHA"),
        ("a_setting_of_next_year", 1),
    ],
)
def test_a_form_that_is_more_than_two_factors_is_refused(stored, name, value):
    with pytest.raises(InputError, match=f"its .'{name}': .* is not supported: W"):
        stored(**{name: value})


@pytest.mark.parametrize("alpha", [0, -1.5])
def test_a_scale_that_is_not_positive_is_refused(stored, alpha):
    with pytest.raises(InputError, match=rf"its lora_alpha = {alpha} must be above 0"):
        stored(lora_alpha=alpha)


def test_an_adapter_of_a_model_that_peft_could_not_name_is_read(stored):
    assert stored(base_model_name_or_path=None)[1] == ""
