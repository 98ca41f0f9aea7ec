"""Models with random weights, batches of synthetic rollouts of lognormal lengths, and copies."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from queues.records import FinishReason, Rollout, RolloutGroup

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAX_MODEL_LEN = 512
"""Longest prompt and completion of an engine that is started without another length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a Qwen3 model and of the batches that it is trained on."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    groups: int
    group_size: int
    tokens: int
    """Median length of a rollout, prompt included."""
    longest: int
    microbatch_tokens: int
    """Capacity of a packed microbatch."""
    dtype: Literal["float32", "bfloat16"] = "float32"


SIZES = {
    "demo": Size(
        hidden=128, layers=3, intermediate=320, heads=4, kv_heads=2, head_size=32, vocabulary=35,
        groups=16, group_size=8, tokens=90, longest=256, microbatch_tokens=256,
    ),
    "60m": Size(
        hidden=640, layers=10, intermediate=1920, heads=10, kv_heads=5, head_size=64,
        vocabulary=16384, groups=4, group_size=4, tokens=320, longest=2048, microbatch_tokens=2048,
    ),
    "0.5b": Size(
        hidden=896, layers=24, intermediate=4864, heads=14, kv_heads=2, head_size=64,
        vocabulary=151936, groups=16, group_size=8, tokens=600, longest=4096,
        microbatch_tokens=16384,
        dtype="bfloat16",
    ),
    "1.5b": Size(
        hidden=1536, layers=28, intermediate=8960, heads=12, kv_heads=2, head_size=128,
        vocabulary=151936, groups=16, group_size=8, tokens=600, longest=4096,
        microbatch_tokens=8192,
        dtype="bfloat16",
    ),
    "tiny": Size(
        hidden=32, layers=2, intermediate=64, heads=2, kv_heads=1, head_size=16, vocabulary=64,
        groups=2, group_size=4, tokens=16, longest=64, microbatch_tokens=128,
    ),
}  # fmt: skip


def qwen3_size(hidden: int, layers: int) -> Size:
    """Return the sizes of a small Qwen3 with a vocabulary of 1,024, for updates of its weights."""
    return Size(
        hidden=hidden, layers=layers, intermediate=3 * hidden, heads=4, kv_heads=2,
        head_size=hidden // 4, vocabulary=1024, groups=1, group_size=1, tokens=1, longest=1024,
        microbatch_tokens=1024,
    )  # fmt: skip


SIGMA = 0.8
"""Standard deviation of the logarithm of a length."""
PROMPT_TOKENS = 8


def build(size: Size, *, attention: str = "sdpa") -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_size,
            max_position_embeddings=size.longest,
            tie_word_embeddings=True,
            attn_implementation=attention,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


def synchronize(device: Any) -> None:
    """Wait until a device of torch has finished its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def timed(device: Any, rounds: int, work: Callable[[], object]) -> float:
    """Return the least seconds of a call on a device of torch, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def time_copies(nbytes: int, times: int) -> list[float]:
    """Return the seconds of warm copies of so many bytes by one thread."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    np.copyto(target, source)
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return seconds


def lognormal_lengths(count: int, *, median: int, longest: int, seed: int) -> list[int]:
    """Return lengths of rollouts, from more than a prompt to `longest` tokens."""
    draw = random.Random(seed)
    return [
        min(longest, max(PROMPT_TOKENS + 1, round(median * draw.lognormvariate(0, SIGMA))))
        for _ in range(count)
    ]


def batch(size: Size, *, seed: int) -> list[RolloutGroup]:
    """Return groups of rollouts of random tokens with rewards 0 and 1, sampled by version 0."""
    lengths = lognormal_lengths(
        size.groups * size.group_size, median=size.tokens, longest=size.longest, seed=seed
    )
    draw = random.Random(seed)
    rollouts = [
        make_rollout(
            [draw.randrange(size.vocabulary) for _ in range(length)], index % size.group_size
        )
        for index, length in enumerate(lengths)
    ]
    return [
        RolloutGroup(
            group_id=f"g{number:08d}",
            prompt_id=f"bench/0/{number}",
            attempt=1,
            rollouts=rollouts[number * size.group_size : (number + 1) * size.group_size],
        )
        for number in range(size.groups)
    ]


def lengths_of(groups: Sequence[RolloutGroup]) -> list[int]:
    """Return the tokens of each rollout, in order."""
    return [len(rollout.token_ids) for group in groups for rollout in group.rollouts]


def sampled_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of tokens of a batch that are trained."""
    return sum(sum(rollout.loss_mask) for group in groups for rollout in group.rollouts)


def make_rollout(
    token_ids: list[int], index: int, *, prompt_length: int = PROMPT_TOKENS
) -> Rollout:
    """Return a rollout of given tokens, sampled by version 0, with reward 0 or 1."""
    sampled = len(token_ids) - prompt_length
    return Rollout(
        sample_index=index,
        token_ids=token_ids,
        prompt_length=prompt_length,
        loss_mask=[False] * prompt_length + [True] * sampled,
        behavior_logprobs=[0.0] * prompt_length + [-2.0] * sampled,
        versions=[-1] * prompt_length + [0] * sampled,
        reward=float(index % 2),
        reward_parts={"correct": float(index % 2)},
        finish_reason=FinishReason.STOP,
        turns=1,
        environment="single_turn",
        engine_id="engine-0",
        created_at=NOW,
        finished_at=NOW,
    )
