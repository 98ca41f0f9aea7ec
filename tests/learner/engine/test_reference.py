"""The reference of a KL penalty: how it moves, and that it goes on from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from learner.engine.reference import REFERENCE_FOLDER, REMAINDERS, Reference, exact_value
from learner.engine.tensor_parts import PartReader
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def reference(path, dtype, *, origin, saved=None):
    policy = load_policy(str(path), LogprobOptions(chunk=4), dtype=dtype, attention="sdpa")
    return policy, Reference(policy, device=CPU, origin=origin, saved=saved)


def saved(reference, folder):
    """Write a reference as a checkpoint does; return its folder, and its weights in float32."""
    reference.capture()(folder)
    own = folder / REFERENCE_FOLDER
    weights = load_file(own / "model.safetensors")
    rest = PartReader(own / REMAINDERS)
    exact = {
        name: exact_value(tensor, rest.read(name, 0, tensor.numel()).view_as(tensor))
        for name, tensor in weights.items()
    }
    return own, exact


def moves(model, count, *, size):
    """Yield weights of a policy that drifts from a model in steps too small for its dtype."""
    make = torch.Generator().manual_seed(0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(count):
        for tensor in weights.values():
            tensor += (size * torch.randn(tensor.shape, generator=make)).to(tensor.dtype)
        yield weights


@pytest.mark.parametrize("mix", [0.001, 0.05, 0.6])
def test_a_reference_in_bfloat16_that_moves_in_part_holds_float32_values(model_path, tmp_path, mix):
    policy, moved = reference(model_path, "bfloat16", origin=model_path)
    exact = {name: p.detach().double() for name, p in policy.model.named_parameters()}
    for weights in moves(policy.model, 40, size=0.01):
        moved.refresh(iter(weights.items()), mix)
        exact = {name: own.lerp(weights[name].double(), mix) for name, own in exact.items()}
    own, held = saved(moved, tmp_path)
    assert held.keys() == exact.keys()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(held[name].double(), exact[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(parameter, held[name].bfloat16()), "it computes with them rounded once"
    again, resumed = reference(own, "bfloat16", origin=model_path, saved=own)
    wide, _ = reference(own, "float32", origin=model_path, saved=own)
    for name, parameter in wide.model.named_parameters():
        assert torch.equal(parameter, held[name]), "another dtype goes on from the same values"
    weights = next(moves(again.model, 1, size=0.01))
    for one in (moved, resumed):
        one.refresh(iter(weights.items()), mix)
    _, first = saved(moved, tmp_path / "first")
    _, second = saved(resumed, tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_that_is_replaced_has_the_weights_of_the_policy_alone(
    model_path, tmp_path, dtype
):
    policy, moved = reference(model_path, dtype, origin=model_path)
    assert moved.capture() is None
    for weights in moves(policy.model, 2, size=0.1):
        moved.refresh(iter(weights.items()), 0.5)
    moved.refresh(iter(weights.items()), 1.0)
    moved.capture()(tmp_path)
    written = load_file(tmp_path / REFERENCE_FOLDER / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    assert not (tmp_path / REFERENCE_FOLDER / REMAINDERS).exists()
