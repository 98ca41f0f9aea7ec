"""Divergence from teachers: its value by definition, its gradient, and what rounding does."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div

from learner.config.distillation import DistillationConfig
from learner.losses.distillation import distillation, divergence
from learner.losses.loss_inputs import LossInputs

NAMES = ("reverse_kl", "forward_kl", "jsd")
WORDS = 9


def random_scores(seed, count=6, dtype=torch.float64, size=2.0):
    make = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(count, WORDS, generator=make, dtype=torch.float64)
    return scores.log_softmax(-1).to(dtype)


def by_definition(name, p, q, beta=0.5):
    """Of whole distributions, given as logs."""

    def kl(first, second):
        return kl_div(second, first, log_target=True, reduction="none").sum(-1)

    mixture = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return {
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jsd": beta * kl(q, mixture) + (1 - beta) * kl(p, mixture),
    }[name]


def told(teacher, count):
    """Return a teacher's likeliest words [N, count], and their log-probabilities."""
    top = teacher.topk(count)
    return top.indices, top.values


def coarse(scores, words):
    """Return whole distributions over some words and all others as one more, by definition."""
    rest = torch.ones_like(scores).scatter(-1, words, 0.0) * scores.exp()
    return torch.cat([scores.gather(-1, words), rest.sum(-1, keepdim=True).log()], dim=-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 4, WORDS - 1])
def test_a_divergence_is_that_of_the_likeliest_words_and_the_rest_as_one_more(name, beta, count):
    policy, teacher = random_scores(1), random_scores(2)
    words, logprobs = told(teacher, count)
    found = divergence(name, policy.gather(-1, words), logprobs, beta=beta)
    expected = by_definition(name, coarse(policy, words), coarse(teacher, words), beta)
    torch.testing.assert_close(found, expected)
    assert (found <= by_definition(name, policy, teacher, beta) + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.1, 2.0, 12.0])
def test_it_is_that_of_whole_distributions_where_every_word_is_told(name, dtype, size):
    policy, teacher = (random_scores(seed, dtype=dtype, size=size) for seed in (1, 2))
    words, logprobs = told(teacher, WORDS)
    own = policy.clone().requires_grad_()
    found = divergence(name, own.gather(-1, words), logprobs)
    exact = by_definition(name, policy.double(), teacher.double())
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(found.double(), exact, **tolerance)
    assert torch.autograd.grad(found.sum(), own)[0].isfinite().all()
    assert divergence(name, logprobs, logprobs).abs().max() < 1e-6


def test_it_has_the_limits_of_the_mixture():
    policy, teacher = random_scores(1), random_scores(2)
    for beta, name in ((1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")):
        share = min(beta, 1 - beta)
        found = divergence("jsd", policy, teacher, beta=beta) / share
        torch.testing.assert_close(found, by_definition(name, policy, teacher), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 4, WORDS])
def test_gradients_agree_with_finite_differences(name, count):
    scores, (words, logprobs) = random_scores(1).requires_grad_(), told(random_scores(2), count)

    def of_logits(logits):
        return divergence(name, logits.log_softmax(-1).gather(-1, words), logprobs, beta=0.3)

    assert torch.autograd.gradcheck(of_logits, (scores,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [2, WORDS])
def test_a_word_that_a_model_excludes_has_a_large_finite_divergence(name, count):
    policy, teacher = random_scores(1).requires_grad_(), random_scores(2).clone()
    teacher[:, 0], never = -torch.inf, policy.detach().clone()
    never[:, 1] = -torch.inf
    for own, other in ((policy, teacher), (never.requires_grad_(), random_scores(2))):
        words, logprobs = told(other, count)
        found = divergence(name, own.gather(-1, words), logprobs)
        slope = torch.autograd.grad(found.sum(), own)[0]
        assert found.isfinite().all()
        assert slope.isfinite().all()


# The term of the loss.


def microbatch(logprobs, behavior=None, mask=None):
    count = len(logprobs)
    return LossInputs(
        logprobs=logprobs,
        behavior_logprobs=logprobs.detach() if behavior is None else behavior,
        advantages=torch.zeros(count),
        mask=torch.ones(count, dtype=torch.bool) if mask is None else mask,
        sequence_ids=torch.zeros(count, dtype=torch.int64),
    )


def settings(count=1, **changes):
    teachers = [{"path": str(number)} for number in range(count)]
    return DistillationConfig(teachers=teachers, **changes)


@pytest.mark.parametrize("lag", [0.0, 0.3])
def test_the_sampled_token_alone_gives_the_gradient_of_the_reverse_kl_in_expectation(lag):
    """Over all tokens that the behaviour policy may draw, which may be an older one."""
    logits = random_scores(1, count=1).requires_grad_()
    policy, teacher = logits.log_softmax(-1)[0], random_scores(2, count=1)[0]
    behavior = (policy.detach() + lag * random_scores(3, count=1)[0]).log_softmax(-1)
    inputs = microbatch(policy, behavior)
    shares = torch.ones(WORDS, 1, dtype=torch.float64)
    term = distillation(settings(top_k=0), inputs, teacher[:, None, None], shares, None)
    whole = divergence("reverse_kl", policy[None], teacher[None]).sum()
    expected = (behavior.exp() * term.per_token).sum()
    torch.testing.assert_close(expected, whole, rtol=1e-6, atol=1e-9)
    found, exact = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in
                    (expected, whole))  # fmt: skip
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("top_k", [0, 3])
def test_teachers_are_averaged_by_share_and_what_they_cannot_score_is_left_out(top_k):
    policy = random_scores(1).requires_grad_()
    mask = torch.tensor([False, True, True, True, True, True])
    inputs = microbatch(policy[:, 0], mask=mask)
    teachers = torch.stack([random_scores(seed)[:, : max(1, top_k)] for seed in (2, 3)], dim=1)
    shares = torch.tensor([[0.25, 0.75]] * 4 + [[1.0, 0.0], [0.0, 0.0]]).double()
    teachers[2, 0, 0], teachers[4, 1] = torch.nan, torch.nan
    own = policy[:, None, :top_k].expand(-1, 2, -1) if top_k else None
    term = distillation(settings(2, top_k=top_k), inputs, teachers, shares, own)
    alone = []
    for number in (0, 1):
        of_one = teachers[:, [number]]
        whole = torch.ones(6, 1).double()
        mine = None if own is None else own[:, [number]]
        alone.append(distillation(settings(top_k=top_k), inputs, of_one, whole, mine).per_token)
    first, second = alone
    expected = torch.stack([
        0 * first[0], 0.25 * first[1] + 0.75 * second[1], 0.75 * second[2],
        0.25 * first[3] + 0.75 * second[3], first[4], 0 * first[5],
    ])  # fmt: skip
    torch.testing.assert_close(term.per_token, expected)
    assert torch.autograd.grad(term.per_token.sum(), policy)[0].isfinite().all()
    assert term.sums.tokens.tolist() == [3, 3]
    torch.testing.assert_close(
        term.sums.divergence, torch.stack([first[[1, 3, 4]].sum(), second[1:4].sum()]).detach()
    )
    assert int(term.not_finite) == 1
    nothing = distillation(settings(2, top_k=top_k), replace(inputs, mask=mask & False), teachers,
                           shares, own)  # fmt: skip
    assert not nothing.per_token.any()
