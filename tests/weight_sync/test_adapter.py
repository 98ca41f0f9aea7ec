"""Adapters travel as factors: checked in the manifest, merged into the weights of a folder."""

from dataclasses import replace

import pytest
import torch

from tests.weight_sync.conftest import Sender
from weight_sync.adapter import (
    A,
    AdapterForm,
    B,
    factor_name,
    merge,
    merged,
    touched,
    weight_name,
)
from weight_sync.errors import IncompatibleWeights, LoadFailed, ManifestError
from weight_sync.manifest import Manifest, check_signature

Q, UP = "model.q.weight", "model.up.weight"
SHAPES = {"model.norm.weight": (4,), Q: (6, 4), UP: (8, 4)}
ADAPTER = AdapterForm(scale=0.5, base="4 bytes, 0123")
EXPECTED = {name: (None, shape) for name, shape in SHAPES.items()}


def base(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in SHAPES.items()}


def factors(seed=1, rank=2, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    shapes = {}
    for name in (Q, UP):
        rows, columns = SHAPES[name]
        shapes |= {factor_name(name, A): (rank, columns), factor_name(name, B): (rows, rank)}
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def published(transport):
    """Return a function that publishes the factors of a version and returns its manifest."""
    sender = Sender(transport, 4096)
    return lambda version, tensors=None: sender.send(version, tensors or factors(version), ADAPTER)


def test_names_are_those_of_peft_and_lead_back_to_the_weight() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = (factor_name(name, kind) for kind in (A, B))
    assert a == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert (weight_name(a), weight_name(b)) == (name, name)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_factors_are_merged_and_all_have_the_dtype_of_the_factors(
    stored, dtype
) -> None:
    weights, adapter = base(stored), factors(dtype=dtype)
    result = dict(merged(weights.items(), adapter, 0.5))
    assert list(result) == list(weights)
    assert {tensor.dtype for tensor in result.values()} == {dtype}
    assert torch.equal(result["model.norm.weight"], weights["model.norm.weight"].to(dtype))
    for name in (Q, UP):
        a, b = (adapter[factor_name(name, kind)] for kind in (A, B))
        exact = weights[name].to(dtype).double() + 0.5 * b.double() @ a.double()
        assert torch.equal(result[name], merge(weights[name].to(dtype), a, b, 0.5))
        torch.testing.assert_close(
            result[name].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6
        )


def test_biases_of_routers_are_not_rounded() -> None:
    bias = torch.tensor([1.0 + 2**-12])
    weights = {**base(torch.bfloat16), "model.layers.1.mlp.gate.e_score_correction_bias": bias}
    *_, last = merged(weights.items(), factors(dtype=torch.bfloat16), 0.5)
    assert torch.equal(last[1], bias)
    assert last[1].dtype == torch.float32


def test_layers_of_the_modules_that_have_factors_may_change() -> None:
    layer = "model.layers.0.self_attn."
    names = [f"{layer}{name}" for name in ("q_proj.weight", "k_proj.bias", "q_norm.weight")]
    others = [
        "model.embed_tokens.weight", "model.layers.10.self_attn.q_proj.weight", "lm_head.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight",
    ]  # fmt: skip
    changes = touched([factor_name(f"{layer}v_proj.weight", kind) for kind in (A, B)])
    assert [name for name in [*names, *others] if changes((name, torch.empty(0)))] == names


def test_a_folder_without_a_weight_that_has_factors_cannot_be_loaded() -> None:
    weights = base()
    del weights[UP]
    with pytest.raises(LoadFailed, match=r"no weights for 2 factors .*model\.up\.lora_A\.weight"):
        dict(merged(weights.items(), factors(), 1.0))


def test_a_manifest_of_factors_survives_json_and_fits_the_engine_that_has_their_weights(
    published,
) -> None:
    manifest = published(3)
    assert manifest.adapter == ADAPTER
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.signature == {name: EXPECTED[name] for name in (Q, UP)}
    check_signature(manifest, EXPECTED)
    with pytest.raises(IncompatibleWeights, match=r"does not know \(model.q.weight\)"):
        check_signature(manifest, {name: EXPECTED[name] for name in (UP, "model.norm.weight")})
    with pytest.raises(IncompatibleWeights, match=r"'model.q.weight' .* \(6, 4\).*\(6, 5\)"):
        check_signature(manifest, {**EXPECTED, Q: (None, (6, 5))})


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, name="model.q.weight"),
        lambda spec: replace(spec, name=factor_name("model.k.weight", A)),
        lambda spec: replace(spec, shape=(1, 4)),
        lambda spec: replace(spec, shape=(8,)),
    ],
)
def test_tensors_that_are_no_pairs_of_factors_are_refused(published, change) -> None:
    manifest = published(0)
    first, *rest = manifest.tensors
    with pytest.raises(ManifestError, match="is no factor of an adapter"):
        replace(manifest, tensors=(change(first), *rest))


async def test_a_receiver_takes_adapter_after_adapter_and_refuses_one_of_another_model(
    engine, published, receiver_of
) -> None:
    receiver = receiver_of(expected=EXPECTED)
    other = {name.replace(".up.", ".down."): tensor for name, tensor in factors(2).items()}
    first, second, refused = [
        await receiver.update(published(version, tensors))
        for version, tensors in ((0, None), (1, None), (2, other))
    ]
    assert (first.error, second.error) == (None, None)
    assert "does not know (model.down.weight)" in refused.error
    assert engine.events == ["pause", "load 0", "resume", "pause", "load 1", "resume"]
    assert engine.weights.keys() == factors().keys()


async def test_a_receiver_has_the_time_that_whole_weights_take_to_load(
    published, receiver_of, monkeypatch
) -> None:
    sizes = []
    monkeypatch.setattr(
        "weight_sync.receive.receiver.allowance",
        lambda timeout, size, *_: sizes.append(size) or 10.0,
    )
    large = {**EXPECTED, "model.embed.weight": (None, (1000, 4))}
    report = await receiver_of(expected=large).update(published(0))
    assert report.error is None
    assert sizes == [4 * (4000 + 4 + 24 + 32)] * 2
