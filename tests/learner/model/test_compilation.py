"""Compiled blocks: what plain ones compute, compiled once, and refused where they differ."""

from functools import partial

import pytest
import torch

from headway.errors import InputError
from learner.config.learner import LearnerConfig, TinyModelConfig
from learner.model.compilation import start_compiler
from learner.model.forward_check import check_forward
from learner.model.logprobs import LogprobOptions
from learner.model.policy import build_tiny, load_policy

CPU = torch.device("cpu")
ROWS = ([5, 9], [8, 3, 2], [40], [4, 4, 4, 4, 30], [7, 90])
"""Lengths of sequences, by row."""


@pytest.fixture(autouse=True)
def _compiler():
    """Allow compiling, which DeepSpeed's engine switches off for its process on a CPU."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.fixture
def traced(monkeypatch):
    """Have blocks traced as ever, and computed without a C++ compiler, which takes seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny(TinyModelConfig(characters="abcdefgh", layers=4), path, seed=0)
    return str(path)


def loaded(folder, **options):
    options = {"dtype": "float32", "attention": "sdpa"} | options
    return load_policy(folder, LogprobOptions(chunk=64), **options)


def row(lengths):
    ids = torch.randint(3, 11, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in lengths])


def passes(policy):
    """Yield log-probabilities and all gradients of each row."""
    for lengths in ROWS:
        policy.zero_grad()
        scores = policy(*row(lengths))[0]
        scores.sum().backward()
        yield scores.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])


def same(policies):
    for found, expected in zip(*map(passes, policies), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_blocks_are_compiled_once_for_all_layers_and_rows(folder, again, traced):
    plain = loaded(folder)
    policy = loaded(folder, compiled=True, activation_checkpointing=again)
    torch._dynamo.utils.counters.clear()
    same((policy, plain))
    parts = 3 + 1  # a block, its attention, and what follows attention in each
    assert torch._dynamo.utils.counters["frames"]["ok"] <= parts


@pytest.mark.slow
def test_blocks_compute_the_same_with_the_compiler_of_the_machine(folder):
    policy = loaded(folder, compiled=True)
    start_compiler(CPU)
    check_forward(policy, policy, device=CPU)
    same((policy, loaded(folder)))


@pytest.mark.slow
def test_blocks_that_differ_when_compiled_are_refused(folder, traced):
    policy = loaded(folder, compiled=True)
    check_forward(policy, policy, device=CPU)
    norm = policy.model.model.layers[1].mlp
    plain = norm.forward
    norm.forward = lambda x: plain(x) * (1.1 if torch.compiler.is_compiling() else 1)
    torch._dynamo.reset()
    with pytest.raises(InputError, match="here and by its own forward pass differ"):
        check_forward(policy, policy, device=CPU)


def test_a_missing_compiler_is_named_with_what_to_install():
    missing = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(missing),
        pytest.raises(InputError, match=r"C\+\+ compiler.*apt-get install g\+\+ python3-dev"),
    ):
        start_compiler(CPU)


@pytest.mark.parametrize(
    ("key", "gpus", "compiles"),
    [(None, 0, False), (None, 1, True), (None, 0.5, True), (True, 0, True), (False, 1, False)],
)
def test_compiling_is_off_on_cpus_unless_asked_for(key, gpus, compiles):
    assert LearnerConfig(learning_rate=1e-6, compile=key, gpus=gpus).compiles is compiles
