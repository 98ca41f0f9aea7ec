"""Adapters and ways of rows: what a recipe's model is looked at for before it is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from actors.engines.model_folder import read_description
from deploy.config.loader import load_recipe
from deploy.preflight.models import check_adapter, check_workers, way_of_rows
from headway.errors import InputError
from learner.config.lora import LoraConfig
from tests.learner.model.architectures import BASE, HEAD, write


@pytest.fixture
def model(tmp_path):
    """Provide a model folder of empty weights."""
    shapes = {
        "model.embed_tokens": (8, 4), "model.layers.0.self_attn.q_proj": (4, 4), "lm_head": (8, 4),
        "model.layers.0.mlp.up_proj": (6, 4), "model.layers.0.norm": (4,),
        "model.layers.0.mlp.experts.0.gate_proj": (6, 4),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["up_proj", "q_proj"]])
def test_an_adapter_of_layers_that_the_model_has_is_taken(model, targets):
    check_adapter(LoraConfig(targets=targets), str(model), section="learner.lora")


@pytest.mark.parametrize("wrong", ["q_prj", "norm", "embed_tokens", "lm_head", "gate_proj"])
def test_an_adapter_of_other_layers_is_refused_at_once(model, wrong):
    message = rf"^sft.lora.targets = .* no linear layers {wrong}; .* are q_proj, up_proj$"
    with pytest.raises(InputError, match=message):
        check_adapter(LoraConfig(targets=["up_proj", wrong]), str(model), section="sft.lora")


def test_a_model_that_cannot_have_an_adapter_is_refused_at_once(model):
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match=r"no linear layers at all; .* are none"):
        check_adapter(LoraConfig(), str(model), section="learner.lora")


def test_an_adapter_to_begin_with_has_its_form_and_is_checked_at_once(model, tmp_path):
    form = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = [f"learner.lora.path={folder}"]
    begins = load_recipe("demo", settings).learner.lora
    with pytest.raises(ValueError, match=r"no adapter can be read from .*adapter_config\.json"):
        check_adapter(begins, str(model), section="learner.lora")
    described = folder / "adapter_config.json"
    described.write_text(json.dumps({**form, "base_model_name_or_path": "mine"}))
    lora = load_recipe("demo", settings).learner.lora
    assert (lora.rank, lora.alpha, lora.rslora, lora.targets) == (4, 8.0, True, ("q_proj",))
    check_adapter(lora, str(model), section="learner.lora")
    named = ["learner.lora.rank=8", 'learner.lora.targets=["q_proj"]']
    other = load_recipe("demo", [*settings, *named]).learner.lora
    with pytest.raises(ValueError, match=r"critic.lora.path = .* has .*'rank': 4.*and the recipe"):
        check_adapter(other, str(model), section="learner.critic.lora")
    described.write_text(json.dumps({**form, "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora"):
        load_recipe("demo", settings)


def test_an_adapter_folder_in_the_place_of_a_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"it is an adapter; .* learner\.lora\.path"):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [(28, 4, {1, 2, 4, 28}), (14, 2, {1, 2, 14}), (32, 8, {1, 2, 4, 8, 16, 32}), (5, 5, {1, 5})],
)
def test_workers_must_share_out_the_heads(tmp_path, heads, kv_heads, allowed):
    sizes = {"model_type": "qwen2", "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for size in range(1, heads + 2):
        config = load_recipe("demo").updated(actors={"tensor_parallel_size": size})
        if size in allowed:
            check_workers(config, str(tmp_path))
            continue
        with pytest.raises(InputError, match=f"= {size}: .* {heads} attention heads .* allowed"):
            check_workers(config, str(tmp_path))
    scripted = config.updated(actors={"engine": "scripted"})
    check_workers(scripted, str(tmp_path))


WAYS = {
    "llama": "packed into one row, with attention = 'sdpa'",
    "gemma2": "packed into one row, with attention = 'eager'",
    "lfm2": "beside others of similar length (about 0.9 of the tokens/s of packed rows)",
    "deepseek_v32, chosen tokens": "one after another (about 0.85 of the tokens/s of packed rows",
}


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_how_sequences_will_be_computed_is_said_with_its_cost(tmp_path, name, way):
    write(name, str(tmp_path))
    config = load_recipe("demo").updated(model={"path": str(tmp_path), "tiny": None})
    assert way_of_rows(config).startswith(f"sequences are computed {way}")


def test_random_weights_are_not_made_for_layers_that_a_machine_might_not_hold(tmp_path):
    many = {"hidden_size": 8192, "moe_intermediate_size": 1024, "num_experts": 128}
    CONFIG_MAPPING["qwen3_moe"](**{**BASE, **HEAD, **many}).save_pretrained(tmp_path)
    config = load_recipe("demo").updated(model={"path": str(tmp_path), "tiny": None})
    assert way_of_rows(config) == (
        "how sequences are computed is not foretold: its layers of each kind have 1.6 billion "
        "weights"
    )
