"""Chunked log-probabilities: equal to the plain ones, gradient included."""

import math

import pytest
import torch

from learner.model import logprobs
from learner.model.logprobs import (
    LogprobOptions,
    chunked_logprobs,
    likeliest_words,
    on_tensor_cores,
)


def chunked(hidden, weight, targets, **options):
    return chunked_logprobs(hidden, weight, targets, LogprobOptions(**options))


def random_problem(dtype=torch.float64, n=11, h=5, v=13):
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, h, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(v, (n,), generator=make)


FORMS = [{}, {"scale": 0.3}, {"cap": 2.0}, {"scale": 1.7, "cap": 1.5}]


def plain(hidden, weight, targets, temperature, scale=1.0, cap=None):
    logits = scale * hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    scores = (logits / temperature).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("both", [False, True], ids=["logprobs", "and entropies"])
def test_values_and_gradients_equal_those_of_the_whole_matrix(chunk, temperature, form, both):
    hidden, weight, targets = random_problem()
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    options = {"temperature": temperature, "chunk": chunk, "entropy_gradient": both}
    results = (
        chunked(hidden, weight, targets, **options, **form),
        plain(hidden, weight, targets, temperature, **form),
    )
    torch.testing.assert_close(*results)
    assert results[0][1].requires_grad == both
    losses = [
        (scores * upstream).sum() - both * (entropy * upstream.flip(0)).sum()
        for scores, entropy in results
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, (hidden, weight)) for loss in losses))


def test_half_precision_weights_give_float32_results_and_their_own_gradients():
    hidden, weight, targets = random_problem(torch.bfloat16)
    logprobs, entropy = chunked(hidden, weight, targets, temperature=1.0, chunk=4)
    logprobs.sum().backward()
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_frozen_head_still_passes_the_gradient_on():
    hidden, weight, targets = random_problem()
    chunked(hidden, weight.detach(), targets, temperature=1.0, chunk=4)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [4, 100])
def test_an_impossible_token_counts_as_if_the_vocabulary_were_without_it(temperature, chunk):
    hidden, weight, targets = random_problem()
    with torch.no_grad():
        hidden[:, 0].abs_().add_(0.1)
    never = torch.tensor([[-math.inf, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    wider = torch.cat([weight.detach(), never]).requires_grad_()
    options = {"temperature": temperature, "chunk": chunk, "entropy_gradient": True}
    found = chunked(hidden, wider, targets, **options)
    expected = plain(hidden, weight, targets, temperature)
    torch.testing.assert_close(found, expected)
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    [mine], [theirs] = (
        torch.autograd.grad((scores * upstream).sum() + (entropy * upstream.flip(0)).sum(), head)
        for (scores, entropy), head in ((found, wider), (expected, weight))
    )
    torch.testing.assert_close(mine, torch.cat([theirs, torch.zeros_like(never)]))


def test_no_tokens_give_no_results():
    hidden, weight, targets = random_problem(n=0)
    assert chunked(hidden, weight, targets, temperature=1.0, chunk=4)[0].shape == (0,)


# Several words in the place of each token.


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("both", [False, True], ids=["logprobs", "and entropies"])
def test_several_targets_of_a_token_are_each_scored_as_if_they_were_alone(form, both):
    hidden, weight, targets = random_problem()
    several = torch.stack([targets, targets, (targets + 5) % 13, targets.flip(0)], dim=1)
    upstream = torch.linspace(-1, 2, several.numel(), dtype=torch.float64).view_as(several)
    options = {"temperature": 0.6, "chunk": 4, "entropy_gradient": both}
    scores, entropy = chunked(hidden, weight, several, **options, **form)
    alone = [plain(hidden, weight, column, 0.6, **form) for column in several.unbind(1)]
    torch.testing.assert_close(scores, torch.stack([column for column, _ in alone], dim=1))
    loss = (scores * upstream).sum() - both * entropy.sum()
    expected = sum((s * up).sum() for (s, _), up in zip(alone, upstream.unbind(1), strict=True))
    torch.testing.assert_close(
        torch.autograd.grad(loss, (hidden, weight)),
        torch.autograd.grad(expected - both * alone[0][1].sum(), (hidden, weight)),
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("count", "words"), [(1, 13), (4, 13), (13, 13), (4, 7), (50, 9)])
def test_the_likeliest_words_are_those_of_the_whole_matrix(form, count, words):
    hidden, weight, _ = random_problem()
    every = torch.arange(13).expand(11, 13)
    scores, _ = chunked(hidden, weight, every, temperature=0.6, chunk=4, **form)
    expected = scores[:, :words].topk(min(count, words))
    options = LogprobOptions(temperature=0.6, chunk=4, **form)
    logprobs, chosen = likeliest_words(hidden, weight, count, words, options)
    torch.testing.assert_close(logprobs, expected.values.detach())
    assert torch.equal(chosen, expected.indices)


# Entropies with a gradient.


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("several", [False, True])
def test_gradients_of_both_results_agree_with_finite_differences(temperature, several):
    hidden, weight, targets = random_problem(n=5, h=3, v=4)
    targets = torch.stack([targets, targets.flip(0), targets], dim=1) if several else targets

    def both(states, head):
        return chunked(
            states, head, targets, temperature=temperature, chunk=2, entropy_gradient=True
        )

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_entropies_alone_may_be_differentiated():
    hidden, weight, targets = random_problem()
    _, entropy = chunked(hidden, weight, targets, temperature=1.0, chunk=4, entropy_gradient=True)
    _, expected = plain(hidden, weight, targets, 1.0)
    torch.testing.assert_close(
        torch.autograd.grad(entropy.sum(), (hidden, weight)),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
    )


# A head in float32.


def exact(hidden, weight, targets, temperature):
    """Of half-precision inputs what float64 makes of them, with gradients."""
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    return plain(*inputs, targets, temperature), inputs


@pytest.mark.parametrize("slice_size", [4, 100])
def test_a_float32_head_multiplies_half_precision_inputs_exactly(slice_size, monkeypatch):
    monkeypatch.setattr(logprobs, "WORDS_AT_A_TIME", slice_size)
    hidden, weight, targets = random_problem(torch.bfloat16, n=40, h=64, v=13)
    upstream = torch.linspace(-1, 2, 40)
    errors = []
    for wide in (True, False):
        found = chunked(hidden, weight, targets, temperature=1.0, chunk=16, float32_head=wide)
        gradients = torch.autograd.grad((found[0] * upstream).sum(), (hidden, weight))
        expected, inputs = exact(hidden, weight, targets, 1.0)
        slopes = torch.autograd.grad((expected[0] * upstream).sum(), inputs)
        errors.append(
            [
                (found[0] - expected[0]).abs().max().item(),
                (found[1] - expected[1]).abs().max().item(),
                *((a - b).abs().max().item() for a, b in zip(gradients, slopes, strict=True)),
            ]
        )
        assert [item.dtype for item in gradients] == [torch.bfloat16] * 2
    precise, rounded = errors
    assert max(precise[:2]) < 1e-4
    assert all(a < b for a, b in zip(precise, rounded, strict=True))


def test_a_float32_head_changes_nothing_for_float32_weights():
    hidden, weight, targets = random_problem(torch.float32)
    results = [
        chunked(hidden, weight, targets, temperature=1.0, chunk=4, float32_head=wide)
        for wide in (True, False)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_float32_head_differentiates_entropies_too():
    hidden, weight, targets = random_problem(torch.bfloat16, n=40, h=64, v=13)
    _, entropy = chunked(
        hidden, weight, targets, temperature=1.0, chunk=16, float32_head=True, entropy_gradient=True
    )
    gradients = torch.autograd.grad(entropy.sum(), (hidden, weight))
    expected, inputs = exact(hidden, weight, targets, 1.0)
    for found, slope in zip(gradients, torch.autograd.grad(expected[1].sum(), inputs), strict=True):
        torch.testing.assert_close(found.double(), slope, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_the_product_of_a_gpu_is_that_of_a_cpu(scale, monkeypatch):
    """The CPU multiplies no halves into float32, so it is shown with the widened factors."""
    mm, used = torch.mm, []

    def widened(first, second, *, out_dtype):
        used.append((first.dtype, second.dtype, out_dtype))
        return mm(first.to(out_dtype), second.to(out_dtype))

    monkeypatch.setattr(torch, "mm", widened)
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)) * scale
    weight = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = on_tensor_cores(gradient, weight)
    assert used == 3 * [(torch.bfloat16, torch.bfloat16, torch.float32)]
    exact = gradient.double() @ weight.double()
    error = float((found - exact).norm() / exact.norm())
    assert error < 2e-7
    assert error < 2 * float((gradient @ weight.float() - exact).norm() / exact.norm())
