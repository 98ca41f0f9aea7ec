"""Adapters: the same outputs merged and not, as PEFT has them, in folders that PEFT loads."""

import json
import shutil
from contextlib import nullcontext

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headway.errors import InputError
from learner.config.lora import CONFIG_FILE, WEIGHTS_FILE, LoraConfig, stored_form
from learner.engine.model_folder import merge_adapter
from learner.model import lora
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import plain_attention
from learner.model.policy import load_policy
from learner.model.scalar_model import load_scalar_model
from tests.learner.model.architectures import write
from weight_sync.adapter import KEPT

IDS, POSITIONS = (
    torch.tensor([5, 9, 4, 7, 3, 8, 8, 6, 4]),
    torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1]),
)
LORA = LoraConfig(rank=4, alpha=8.0)


def load(path, dtype="float32"):
    return load_policy(path, LogprobOptions(chunk=4), dtype=dtype, attention="sdpa")


def adapted(path, config=LORA, *, seed=1, dtype="float32"):
    """Return a policy whose adapter changes its outputs."""
    policy = load(path, dtype)
    lora.add_adapter(policy.model, config, seed=0)
    make = torch.Generator().manual_seed(seed)
    for _, (factor,), _ in lora.factors(policy.model):
        factor.data = (0.3 * torch.randn(factor.shape, generator=make)).to(factor.dtype)
    return policy


def written(policy, folder):
    """Write the folder of an adapter; return its tensors."""
    tensors = {factor.name: factor.value() for factor in lora.factors(policy.model)}
    lora.write_adapter(policy.model, tensors, folder)
    return tensors


@torch.no_grad()
def outputs(policy):
    return policy(IDS, POSITIONS)[0]


def logits(model):
    with torch.no_grad(), plain_attention(model, written_out=False):
        return model(input_ids=IDS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("rslora", [False, True])
def test_a_model_with_its_adapter_merged_in_has_the_same_outputs(model_path, rslora):
    policy, plain = (
        adapted(model_path, LORA.model_copy(update={"rslora": rslora})),
        load(model_path),
    )
    names = [name for name, _ in plain.model.named_parameters()]
    merged = {weight.name: weight.value() for weight in lora.weights(policy.model)}
    assert list(merged) == names
    assert not torch.allclose(outputs(policy), outputs(plain), atol=1e-2)
    changed = {
        name for name, p in plain.model.named_parameters() if not torch.equal(p, merged[name])
    }
    assert changed == {name for name in names if name.endswith("_proj.weight")}
    plain.model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(outputs(plain), outputs(policy), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(plain.model), logits(policy.model), atol=1e-5, rtol=0)


def test_a_new_adapter_changes_nothing_and_freezes_all_else(model_path):
    policy, plain = load(model_path), load(model_path)
    state = torch.get_rng_state()
    lora.add_adapter(policy.model, LORA, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outputs(policy), outputs(plain))
    trained = {id(p) for p in policy.model.parameters() if p.requires_grad}
    assert trained == {id(p) for _, (p,), _ in lora.factors(policy.model)}
    assert len(trained) == 2 * 7 * 2
    again = load(model_path)
    lora.add_adapter(again.model, LORA, seed=0)
    for one, other in zip(lora.factors(policy.model), lora.factors(again.model), strict=True):
        assert torch.equal(one.value(), other.value())


def test_a_model_whose_adapter_is_switched_off_is_the_base_bit_for_bit(model_path):
    policy = adapted(model_path)
    on = outputs(policy)
    with lora.switched_off(policy.model):
        assert torch.equal(outputs(policy), outputs(load(model_path)))
    assert torch.equal(outputs(policy), on)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_what_is_written_and_what_peft_writes_is_gone_on_with(
    model_path, tmp_path, dtype
):
    policy = adapted(model_path, dtype=dtype)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    tensors = written(policy, ours)
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    loaded = peft.PeftModel.from_pretrained(base, ours, autocast_adapter_dtype=False)
    reference = load(model_path, dtype)
    lora.add_adapter(reference.model, LORA.model_copy(update={"path": str(ours)}), seed=5)
    assert torch.equal(outputs(reference), outputs(policy))
    assert torch.equal(logits(loaded.get_base_model()), logits(policy.model))
    loaded.save_pretrained(theirs)
    again = load(model_path, dtype)
    lora.add_adapter(again.model, LORA.model_copy(update={"path": str(theirs)}), seed=6)
    assert torch.equal(outputs(again), outputs(policy))


def test_an_adapter_folder_becomes_that_of_the_merged_model(model_path, tmp_path):
    policy = adapted(model_path)
    written(policy, tmp_path)
    described = json.loads((tmp_path / CONFIG_FILE).read_text())
    described["base_model_name_or_path"] = "/gone"
    (tmp_path / CONFIG_FILE).write_text(json.dumps(described))
    with pytest.raises(InputError, match=r"'/gone', .* is not here: name .* with --base"):
        merge_adapter(tmp_path)
    merge_adapter(tmp_path, model_path)
    assert not list(tmp_path.glob("adapter*"))
    whole = load(str(tmp_path))
    torch.testing.assert_close(outputs(whole), outputs(policy), atol=1e-5, rtol=0)
    for weight in lora.weights(policy.model):
        assert torch.equal(whole.model.get_parameter(weight.name), weight.value()), weight.name


def test_an_adapter_of_other_weights_is_refused_and_of_unknown_ones_reported(
    model_path, tmp_path, caplog
):
    moved, other, folder = (tmp_path / name for name in ("moved", "other", "adapter"))
    policy = adapted(str(shutil.copytree(model_path, moved)))
    folder.mkdir()
    written(policy, folder)
    moved.rename(other)
    config = LORA.model_copy(update={"path": str(folder)})
    lora.add_adapter(load(model_path).model, config, seed=0)
    weights = load_file(other / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"on other weights than those of .*{other}': on .*moved"):
        lora.add_adapter(load(str(other)).model, config, seed=0)
    assert not caplog.records
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(tensors, folder / WEIGHTS_FILE)  # as PEFT writes it
    lora.add_adapter(load(str(other)).model, config, seed=0)
    assert "moved' , which is not compared" in caplog.text.replace("',", "' ,")


def test_an_adapter_of_other_tensors_than_its_targets_make_is_refused(model_path, tmp_path):
    policy = adapted(model_path)
    written(policy, tmp_path)
    config = LORA.model_copy(update={"targets": ("q_proj",), "path": str(tmp_path)})
    with pytest.raises(InputError, match=r"other tensors .*: base_model.model.model.layers.0"):
        lora.add_adapter(load(model_path).model, config, seed=0)


def test_adapters_that_hold_more_than_factors_or_are_damaged_are_refused(model_path, tmp_path):
    policy = adapted(model_path)
    tensors = written(policy, tmp_path)
    config = LORA.model_copy(update={"path": str(tmp_path)})
    file = tmp_path / WEIGHTS_FILE
    embedding = "base_model.model.model.embed_tokens.weight"
    save_file({**tensors, embedding: torch.ones(4, 4)}, file)
    with pytest.raises(InputError, match=f"other tensors .*{embedding}"):
        lora.add_adapter(load(model_path).model, config, seed=0)
    save_file(tensors, file)
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-5]), file.unlink):
        damage()
        with pytest.raises(InputError, match=r"adapter_model\.safetensors cannot be read"):
            lora.add_adapter(load(model_path).model, config, seed=0)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"target_modules": ["self_attn.q_proj", "mlp.up_proj"]}, 4),
        ({"target_modules": ["q_proj", "no_such_layer"]}, 2),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, 1),
        ({"target_modules": r"model\.layers\.1\..*(q|up)_proj"}, 2),
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*"}, 2),
        ({"target_modules": ["q_proj"], "use_rslora": True}, 2),
    ],
)
def test_an_adapter_changes_the_layers_that_it_does_in_peft_and_goes_on_as_one(
    model_path, tmp_path, settings, layers
):
    base = AutoModelForCausalLM.from_pretrained(model_path)
    chosen = peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(base, chosen)
    theirs.save_pretrained(tmp_path / "theirs")
    stored, _ = stored_form(tmp_path / "theirs")
    policy = load(model_path)
    lora.add_adapter(policy.model, stored, seed=0)
    assert len(list(lora.factors(policy.model))) == 2 * layers
    assert torch.equal(logits(policy.model), logits(theirs.get_base_model()))
    (tmp_path / "ours").mkdir()
    written(policy, tmp_path / "ours")
    again = load(model_path)
    form = stored.model_copy(update={"path": None})  # as a checkpoint is gone on with
    lora.add_adapter(again.model, form, seed=0)
    assert [f.name for f in lora.factors(again.model)] == [
        f.name for f in lora.factors(policy.model)
    ]
    base = AutoModelForCausalLM.from_pretrained(model_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    assert torch.equal(logits(loaded.get_base_model()), logits(policy.model))


@pytest.mark.parametrize("targets", [("q_proj", "wrong"), ("lm_head",)])
def test_layers_that_cannot_have_an_adapter_are_refused_with_those_that_can(model_path, targets):
    config = LORA.model_copy(update={"targets": targets})
    allowed = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(InputError, match=f"no linear layers {targets[-1]}; .* are {allowed}"):
        lora.add_adapter(load(model_path).model, config, seed=0)


def test_a_model_without_linear_layers_is_refused(tmp_path):
    """GPT-2 has PEFT's other kind of layer, `Conv1D`, whose weights are transposed."""
    write("gpt2", tmp_path)
    for targets in ("all-linear", ("c_attn",)):
        config = LORA.model_copy(update={"targets": targets})
        with pytest.raises(InputError, match="those that can have an adapter are none"):
            lora.add_adapter(load(str(tmp_path)).model, config, seed=0)


def test_a_critic_has_its_head_beside_its_adapter_in_folders_that_peft_loads(model_path, tmp_path):
    def critic(seed=3, **settings):
        model = load_scalar_model(model_path, dtype="float32", attention="sdpa", seed=seed)
        lora.add_adapter(model.model, LORA.model_copy(update=settings), seed=0)
        return model

    model = critic()
    with torch.no_grad():
        for _, (parameter,), _ in lora.trained(model.model):
            parameter.add_(0.1 * torch.randn(parameter.shape))
    tensors = {weight.name: weight.value() for weight in lora.trained(model.model)}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(parameter) for _, (parameter,), _ in lora.trained(model.model)
    }
    lora.write_adapter(model.model, tensors, tmp_path)
    again = critic(seed=4, path=str(tmp_path))
    assert torch.equal(again(IDS, POSITIONS)[0], model(IDS, POSITIONS)[0])
    base = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).get_base_model()
    assert torch.equal(loaded.score.weight, model.model.score.weight)


@pytest.mark.parametrize(("size", "low", "high"), [(1.0, 0.0, 0.05), (1e-5, 0.9, 1.1)])
def test_what_rounding_takes_of_small_changes_is_measured(model_path, size, low, high):
    policy = adapted(model_path, dtype="bfloat16")
    for _, (factor,), _ in lora.factors(policy.model):
        factor.data *= size**0.5
    assert low < lora.lost_to_rounding(policy.model, nullcontext) < high
    wide = load(model_path)
    lora.add_adapter(wide.model, LORA, seed=0)
    wide.model.load_state_dict(policy.model.state_dict())
    measured = lora.lost_to_rounding(policy.model, nullcontext)
    assert lora.lost_to_rounding(wide.model, nullcontext) == pytest.approx(measured, rel=1e-3)
    new = load(model_path, "bfloat16")
    lora.add_adapter(new.model, LORA, seed=0)
    assert lora.lost_to_rounding(new.model, nullcontext) is None


def test_what_rounding_takes_is_measured_in_layers_of_all_kinds(build_model):
    square = {"hidden_size": 16, "intermediate_size": 16, "heads": 1, "kv_heads": 1}
    policy = adapted(build_model(characters="01", layers=8, **square))
    names = {id(weight.parameters[0]): weight.name for weight in lora.weights(policy.model)}
    sampled = []

    def gathered(parameters):
        sampled.append(names[id(parameters[0])])
        return nullcontext()

    lora.lost_to_rounding(policy.model, gathered)
    first = sampled.copy()
    assert len(set(first)) == lora.SAMPLED_LAYERS
    assert len({name.split(".")[-2] for name in first}) >= 5
    lora.lost_to_rounding(policy.model, gathered)
    assert sampled == 2 * first


def test_the_head_and_experts_in_one_tensor_get_no_factors(tmp_path):
    write("qwen3_moe", tmp_path)
    policy = adapted(str(tmp_path))
    names = {name.split(".")[-3] for name, _, _ in lora.factors(policy.model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_weights_that_the_learner_keeps_in_float32_are_those_that_engines_do_not_round(
    tmp_path, family
):
    write(family, tmp_path)
    state = load(str(tmp_path), "bfloat16").model.state_dict()
    wide = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in state if name.endswith(KEPT)} != set()


@settings(deadline=None)
@given(seed=st.integers(0, 2**16), rank=st.integers(1, 5), scale=st.floats(-4, 4))
def test_merging_rounds_once(seed, rank, scale):
    make = torch.Generator().manual_seed(seed)
    weight, a, b = (torch.randn(shape, generator=make) for shape in ((6, 4), (rank, 4), (6, rank)))
    for dtype in (torch.float32, torch.bfloat16):
        parts = [nn.Parameter(part.to(dtype)) for part in (weight, a, b)]
        exact = parts[0].double() + scale * parts[2].double() @ parts[1].double()
        value = lora.Weight("w", tuple(parts), scale).value()
        assert value.dtype == dtype
        torch.testing.assert_close(
            value.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5, check_dtype=False
        )
