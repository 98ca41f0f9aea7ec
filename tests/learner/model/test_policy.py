"""Outputs of a policy for packed sequences: for the wanted tokens the same as for all."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headway.errors import InputError
from learner.model.logprobs import LogprobOptions
from learner.model.policy import Policy, load_policy, prepare
from learner.model.scalar_model import load_scalar_model
from tests.learner.model.architectures import configuration, write

LENGTHS = [5, 1, 7, 3]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration("qwen3")).double().eval()
    policy = Policy(model, LogprobOptions(chunk=4, temperature=0.7, entropy_gradient=True))
    policy.value_head = torch.nn.Linear(32, 1, bias=False, dtype=torch.float64)
    return policy


def outcome(policy, wanted, *, masked):
    """Of a row logprobs, entropies and values, and the gradients of a loss over wanted tokens."""
    tokens = torch.arange(TOKENS) * 7 % 40
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    policy.zero_grad()
    logprobs, entropies, values = policy(tokens, places, None if masked else wanted)
    if masked:
        logprobs, entropies = (torch.where(wanted, x, 0.0) for x in (logprobs, entropies))
    slope = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    loss = (logprobs * slope + entropies * slope.flip(0)).sum() + (values * slope)[wanted].sum()
    loss.backward()
    said = [logprobs.detach(), entropies.detach(), values.detach()]
    return said, [parameter.grad for parameter in policy.parameters()]


@given(wanted=st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS))
def test_wanted_tokens_alone_give_what_all_give_when_the_others_are_masked_out(policy, wanted):
    wanted = torch.tensor(wanted)
    expected, gradients = outcome(policy, wanted, masked=True)
    found, own = outcome(policy, wanted, masked=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-10)


def test_a_row_of_which_no_token_is_wanted_reaches_every_parameter(policy):
    said, gradients = outcome(policy, torch.zeros(TOKENS, dtype=torch.bool), masked=False)
    assert not said[0].any()
    assert not said[1].any()
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("name", "said"), [("qwen3_moe", True), ("qwen3", False)])
def test_the_log_says_that_the_load_of_experts_is_not_balanced(tmp_path, caplog, name, said):
    write(name, str(tmp_path))
    load_policy(str(tmp_path), LogprobOptions(chunk=4), dtype="float32", attention="sdpa")
    assert ("router_aux_loss_coef = 0.001 has no effect" in caplog.text) == said


def test_the_value_after_a_token_is_that_before_the_next(policy):
    tokens, places = torch.arange(9) * 7 % 40, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    policy.values_after = True
    try:
        *_, before, after = policy(tokens, places)
    finally:
        policy.values_after = False
    cut = [1, 2, 3, 5, 6, 7, 8]
    torch.testing.assert_close(before[cut], after[[at - 1 for at in cut]])
    assert before[0] == before[4] == 0
    longer = torch.cat([tokens, torch.tensor([11])]), torch.cat([places, torch.tensor([5])])
    torch.testing.assert_close(policy(*longer)[2][-1], after[8], msg="the value after the last")


def test_activations_that_transformers_cannot_checkpoint_are_refused(tmp_path):
    write("gptj", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.supports_gradient_checkpointing = False
    policy = Policy(model, LogprobOptions(chunk=4))
    with pytest.raises(InputError, match="transformers cannot checkpoint the layers of GPTJ"):
        prepare(policy, "gptj", attention="sdpa", activation_checkpointing=True)


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


LOADERS = {
    "policy": partial(load_policy, options=LogprobOptions(chunk=4)),
    "critic": partial(load_scalar_model, seed=0),
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_weights_in_a_pickle_are_not_looked_at(tiny_model, tmp_path, monkeypatch, load):
    folder, mark = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Runs(mark)}, folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load(str(folder), dtype="float32", attention="sdpa")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("policy", ["lm_head.weight"]),
        ("policy", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]),
        ("critic", ["model.layers.1.mlp.up_proj.weight"]),
    ],
)
def test_weights_that_a_folder_lacks_are_not_made_up(tmp_path, kind, lacking):
    write("llama", str(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors.keys() - set(lacking)}, file)
    message = rf"lacks {len(lacking)} of the weights, .* \({', '.join(lacking)}\)$"
    with pytest.raises(InputError, match=message):
        LOADERS[kind](str(tmp_path), dtype="float32", attention="sdpa")
