"""The form of adapters: which layers they change, and what a folder of PEFT's may say."""

import json

import pytest

from headway.errors import InputError
from learner.config.lora import CONFIG_FILE, LoraConfig, adapted_layers, check_form, stored_form

LINEAR = {"q_proj", "up_proj"}
STORED = {
    "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"], "peft_type": "LORA", "bias": "none",
    "base_model_name_or_path": "/model",
}  # fmt: skip


def layers(targets, linear=LINEAR, *, quantised=False):
    return adapted_layers(
        LoraConfig(targets=targets), model="m", linear=linear, quantised=quantised, section="a.lora"
    )


def test_all_linear_layers_or_those_named_get_factors():
    assert layers("all-linear") == ["q_proj", "up_proj"]
    assert layers(["up_proj"]) == ["up_proj"]
    assert layers(["any"], linear=None) == [], "of a model that is not here"


@pytest.mark.parametrize(
    ("targets", "arguments", "message"),
    [
        (["q_proj", "wrong"], {}, r"^a.lora.targets = .*'m' has no linear layers wrong; .* are q_"),
        ("all-linear", {"linear": set()}, "no linear layers at all; .* an adapter are none$"),
        (["q_proj"], {"quantised": True}, "'m' has quantised weights, into which engines cannot"),
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
