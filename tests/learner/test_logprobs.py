"""Chunked log-probabilities: equal to the plain ones, gradient included."""

import math

import pytest
import torch

from learner.errors import InputError
from learner.logprobs import chunked_logprobs


def random_problem(dtype=torch.float64, n=11, h=5, v=13):
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, h, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(v, (n,), generator=make)


def plain(hidden, weight, targets, temperature):
    scores = (hidden @ weight.T / temperature).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_those_of_the_whole_matrix(chunk, temperature):
    hidden, weight, targets = random_problem()
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    found = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    expected = plain(hidden, weight, targets, temperature)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1].detach())
    torch.testing.assert_close(
        torch.autograd.grad((found[0] * upstream).sum(), (hidden, weight)),
        torch.autograd.grad((expected[0] * upstream).sum(), (hidden, weight)),
    )


def test_gradients_agree_with_finite_differences():
    hidden, weight, targets = random_problem(n=5, h=3, v=4)

    def scored(states, head):
        return chunked_logprobs(states, head, targets, temperature=0.7, chunk=2)[0]

    assert torch.autograd.gradcheck(scored, (hidden, weight))


def test_uniform_logits_give_minus_log_of_the_vocabulary():
    logprobs, entropy = chunked_logprobs(
        torch.zeros(3, 2), torch.ones(7, 2), torch.tensor([0, 3, 6]), temperature=1.0, chunk=2
    )
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(7)))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(7)))


def test_half_precision_weights_give_float32_results_and_their_own_gradients():
    hidden, weight, targets = random_problem(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=4)
    logprobs.sum().backward()
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_entropy_carries_no_gradient():
    hidden, weight, targets = random_problem()
    assert not chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=4)[1].requires_grad


def test_a_frozen_head_still_passes_the_gradient_on():
    hidden, weight, targets = random_problem()
    chunked_logprobs(hidden, weight.detach(), targets, temperature=1.0, chunk=4)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_impossible_tokens_do_not_spoil_the_entropy():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [-math.inf]])
    logprobs, entropy = chunked_logprobs(
        hidden, weight, torch.tensor([0]), temperature=1.0, chunk=1
    )
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


def test_no_tokens_give_no_results():
    hidden, weight, targets = random_problem(n=0)
    assert chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=4)[0].shape == (0,)


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 4), (1.0, 0)])
def test_temperature_and_chunk_must_be_positive(temperature, chunk):
    with pytest.raises(InputError, match=f"found {temperature} and {chunk}"):
        chunked_logprobs(*random_problem(), temperature=temperature, chunk=chunk)
