"""Compiled sums over the words: what they compute, and how many bytes the head moves with them."""

import math

import pytest
import torch
from torch._inductor import compile_fx, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.logprobs import LogprobOptions, chunked_logprobs

WORDS, WIDTH, TOKENS = 151_936, 896, 1024
"""Of Qwen2.5 0.5B, and tokens of a chunk."""
LOGITS = TOKENS * WORDS * 2
"""Bytes of a chunk of logits in bfloat16."""


@pytest.fixture(autouse=True)
def _compiler():
    """Allow compiling, which DeepSpeed's engine switches off for its process on a CPU."""
    with torch._dynamo.config.patch(disable=False):
        yield


def problem(dtype, n=21, h=16, v=1000):
    make = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, h, generator=make, dtype=torch.float64) for size in (n, v))
    return hidden.to(dtype), weight.to(dtype), torch.randint(v, (n,), generator=make)


def results(hidden, weight, targets, **options):
    """Return log-probabilities, entropies, and gradients of both inputs."""
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    options = LogprobOptions(chunk=8, **options)
    scores, entropies = chunked_logprobs(*inputs, targets, options)
    upstream = torch.linspace(-1, 2, targets.numel(), dtype=scores.dtype)
    loss = (scores * upstream.view_as(scores)).sum()
    if options.entropy_gradient:
        loss = loss + (entropies * upstream[: len(targets)].flip(0)).sum()
    return [scores.detach(), entropies.detach(), *torch.autograd.grad(loss, inputs)]


def distance(found, expected):
    """Return the largest difference, relative to the largest expected value or to 1."""
    expected = expected.double()
    return float((found.double() - expected).abs().max() / max(1.0, expected.abs().max()))


FORMS = [
    {},
    {"scale": 0.3, "temperature": 0.6},
    {"scale": 1.7, "cap": 1.5, "temperature": 1.3, "entropy_gradient": True},
    {"entropy_gradient": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_compiled_sums_equal_those_in_place_in_float32(options, several):
    hidden, weight, targets = problem(torch.float32)
    targets = torch.stack([targets, targets.flip(0), targets], dim=1) if several else targets
    inputs = hidden, weight, targets
    compiled, plain = (results(*inputs, compiled=way, **options) for way in (True, False))
    exact = results(*(column.double() for column in inputs[:2]), inputs[2], **options)
    for mine, theirs, judge in zip(compiled, plain, exact, strict=True):
        assert distance(mine, theirs) < 1e-6
        assert distance(mine, judge) < max(1e-6, 2 * distance(theirs, judge))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16 head", "float32 head"])
def test_compiled_sums_differ_from_those_in_place_by_rounding_in_bfloat16(wide):
    inputs, options = problem(torch.bfloat16), {"float32_head": wide, "entropy_gradient": True}
    compiled, plain = (results(*inputs, compiled=way, **options) for way in (True, False))
    for mine, theirs in zip(compiled, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert distance(mine, theirs) < (1e-6 if mine.dtype == torch.float32 else 2**-8)


@pytest.mark.slow
def test_an_impossible_word_adds_nothing_and_a_nan_stays():
    hidden, weight, targets = problem(torch.float32)
    hidden[:, 0] = hidden[:, 0].abs() + 0.1
    never = torch.tensor([[-math.inf, *[0.0] * 15]])
    options = {"compiled": True, "entropy_gradient": True}
    found = results(hidden, torch.cat([weight, never]), targets, **options)
    expected = results(hidden, weight, targets, **options)
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert distance(mine, theirs) < 1e-6
    assert distance(found[3][:-1], expected[3]) < 1e-6
    assert not found[3][-1].any()
    for compiled in (False, True):
        hidden[4, 0] = math.nan
        broken = results(hidden, weight, targets, compiled=compiled)
        assert [column.isnan().nonzero().flatten().tolist() for column in broken[:2]] == [[4], [4]]


class Traffic(TorchDispatchMode):
    """Sums the bytes that operators read and write; `gather` and its like touch indices alone."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        schema, name = func._schema, func._opname
        written = [argument for argument in schema.arguments if argument.is_write]
        views = not written and any(result.alias_info is not None for result in schema.returns)
        if views or "empty" in name:
            return output
        given = dict(zip([argument.name for argument in schema.arguments], args, strict=False))
        given |= kwargs or {}
        if name in ("gather", "scatter_add_"):
            self.bytes[name] = given["index"].nbytes + 2 * given["index"].numel() * 4
            return output
        if name.endswith("_like"):
            given = {}
        if name == "copy_" or func._overloadname.endswith("out"):
            given = {
                key: value for key, value in given.items() if key not in [w.name for w in written]
            }
        moved = {id(tensor): tensor for tensor in tree_leaves(given) if tensor is not None}
        moved = [*moved.values(), *tree_leaves(output)]
        size = sum(tensor.nbytes for tensor in moved if isinstance(tensor, torch.Tensor))
        self.bytes[name] = self.bytes.get(name, 0) + size
        return output


def head_bytes(**options):
    """Return bytes by operator of a chunk of tokens, forward and backward, without computing."""
    with torch.device("meta"):
        hidden = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(WORDS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(TOKENS, dtype=torch.int64)
    with Traffic() as traffic:
        scores, _ = chunked_logprobs(hidden, weight, targets, LogprobOptions(chunk=1024, **options))
        scores.sum().backward()
    return traffic.bytes


def test_the_head_moves_a_third_of_the_bytes_with_compiled_sums():
    before, after = head_bytes(), head_bytes(compiled=True)
    assert sum(before.values()) == pytest.approx(17.8e9, rel=0.01)
    assert sum(after.values()) == pytest.approx(5.46e9, rel=0.01)
    assert (after["word_sums"], after["word_gradient"]) == pytest.approx((LOGITS, 2 * LOGITS), 0.01)


@pytest.mark.slow
def test_kernels_read_the_logits_once_and_write_their_gradient_once(monkeypatch):
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)
    hidden, weight, targets = problem(torch.bfloat16, n=64, v=4096)
    torch._dynamo.reset()
    metrics.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        chunked_logprobs(
            hidden, weight.requires_grad_(), targets, LogprobOptions(chunk=64, compiled=True)
        )[0].sum().backward()
    assert metrics.num_bytes_accessed == pytest.approx(3 * 64 * 4096 * 2, rel=0.02)
