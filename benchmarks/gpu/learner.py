"""The learner's part of the suite: utilisation, and the effective sample size by lag.

Needs PyTorch, transformers, numpy and pydantic. Both parts yield their figures so far, so that a
deadline costs only the later ones.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.synthetic_load import SIZES, Size, batch, build, lengths_of, sampled_tokens
from benchmarks.training.utilisation import (
    ClockedEngine,
    Peak,
    figures_of,
    shape_of,
    timed_rounds,
    training_flops,
)
from headway.errors import HeadwayError
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.engine.protocol import Forward
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import attend_packed
from learner.model.policy import Policy
from learner.update import Updater
from queues.records import RolloutGroup

ATTENTION = ("packed", "masked")
"""Sequence by sequence, as `attention = "sdpa"`; and with a mask over the microbatch, as in
transformers by default."""
LAGS = 8
LEARNING_RATE = 1e-6
LAG_LEARNING_RATE = 1e-4
"""Large, so that the weights move by more than rounding: near 0.02, the spread of the
weights, half of the distance between two bfloat16 numbers is 6e-5, and a smaller step is lost."""

Batches = Callable[[], Sequence[RolloutGroup]]


CLIP = 1.0


class PlainEngine:
    """One process, one device, AdamW."""

    rank, ranks, gathers = 0, 1, False

    def __init__(self, policy: Policy, *, learning_rate: float) -> None:
        self.steps_taken, self.learning_rate = 0, learning_rate
        self._policy = policy
        self._weights: list[Tensor] = [p for p in policy.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in self._weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, fused=True)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._masters[0].device

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """See `TrainEngine.forward`."""
        columns = (token_ids, position_ids) if wanted is None else (token_ids, position_ids, wanted)
        return Forward(*self._policy(*(column.to(self.device) for column in columns)))

    def base_logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """See `TrainEngine.base_logprobs`; there is no adapter."""
        return self.forward(token_ids, position_ids, wanted).logprobs

    def backward(self, loss: Tensor) -> None:
        """See `Trainable.backward`."""
        torch.autograd.backward(loss)
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None and master.grad is not None:
                master.grad.add_(weight.grad)
                weight.grad = None

    def step(self) -> float:
        """See `Trainable.step`."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, CLIP))
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        for master in self._masters:
            if master.grad is not None:
                master.grad.zero_()
        self.steps_taken += 1
        return norm

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """See `TrainEngine.sum_over_ranks`."""
        return values

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        yield from self._policy.model.named_parameters()

    def adopt(
        self, config: OptimizerConfig, total_steps: int, rates: Mapping[str, float] | None = None
    ) -> None:
        """Raise HeadwayError, since this engine takes few steps, all at one rate."""
        raise HeadwayError("settings do not change: this engine is for benchmarks")

    def capture(self) -> Callable[[Path], None]:
        """Raise `HeadwayError`."""
        raise HeadwayError("nothing is saved: this engine is for benchmarks")

    def load(self, folder: Path) -> None:
        """Raise `HeadwayError`."""
        raise HeadwayError(f"nothing is loaded from {folder}: this engine is for benchmarks")

    def close(self) -> None:
        """See `Trainable.close`."""


def make(size: Size, device: torch.device, *, packed: bool, rate: float) -> PlainEngine:
    """Return an engine with random weights on the device.

    Raises:
        HeadwayError: The model cannot attend sequence by sequence.
    """
    torch.manual_seed(0)
    with device:
        model = build(size).eval()
    # In float32, where rounding differs least.
    if packed and not attend_packed(model):
        raise HeadwayError("the model cannot attend sequence by sequence")
    policy = Policy(model.to(getattr(torch, size.dtype)), LogprobOptions(chunk=1024))
    return PlainEngine(policy, learning_rate=rate)


def utilisation(name: str, device: torch.device, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield tokens/s, and operations beside the best product, with each kind of attention.

    The slower one, with a mask, gets half as many rounds. Without pyarrow, batches are read as
    lists of Python instead of arrays, and the share is called `host_of_lists`.
    """
    size = SIZES[name]
    with torch.device("meta"):
        model = build(size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield {"parameters": parameters, "engine": "torch, without DeepSpeed"}
    groups = batch(size, seed=1)
    flops = training_flops(shape_of(model), lengths_of(groups), sampled_tokens(groups))
    read, host = _reading(groups)
    peak = Peak(device, getattr(torch, size.dtype))
    for kind in ATTENTION:
        count = rounds if kind == "packed" else (rounds + 1) // 2
        try:
            timed = _rounds(size, device, peak, read, packed=kind == "packed", rounds=count)
        except (torch.OutOfMemoryError, HeadwayError) as error:
            yield {kind: {"failed": str(error).splitlines()[0]}}
        else:
            figures = figures_of(timed, flops, sum(lengths_of(groups)))
            figures["shares"][host] = figures["shares"].pop("host")
            yield {kind: figures | _memory(device)}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rounds(
    size: Size, device: torch.device, peak: Peak, read: Batches, *, packed: bool, rounds: int
) -> list[dict[str, float]]:
    """Return `timed_rounds` of a batch."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    config = LearnerConfig(microbatch_tokens=size.microbatch_tokens, dtype=size.dtype)
    engine = make(size, device, packed=packed, rate=LEARNING_RATE)
    clocked = ClockedEngine(engine, device)
    return timed_rounds(Updater(clocked, config), clocked, read, peak, rounds)


def _reading(groups: Sequence[RolloutGroup]) -> tuple[Batches, str]:
    """Return how a batch is read, and the name of its share of the time."""
    try:
        from queues.schema import decode_arrays, encode
    except ImportError:
        return (lambda: groups), "host_of_lists"
    payloads = [encode(group) for group in groups]
    return (lambda: decode_arrays(payloads)), "host"


def _memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {"bytes": torch.cuda.max_memory_allocated(device)}


def sample_size_by_lag(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the effective sample size of batches that version 0 sampled, by the training version.

    Tokens are drawn uniformly, which is nearly what a model with random weights samples; rewards
    are as good as random. So the figures show a shape, and not those of a task. At lag 0 it falls
    short of 1 by the rounding of a microbatch against its sequences alone.
    """
    size = replace(SIZES[name], groups=4)
    engine = make(size, device, packed=True, rate=LAG_LEARNING_RATE)
    updater = Updater(
        engine, LearnerConfig(microbatch_tokens=size.microbatch_tokens, dtype=size.dtype)
    )
    batches = [_as_sampled(batch(size, seed=lag), engine) for lag in range(LAGS + 1)]
    keys = ("ess", "ess_sequence", "kl", "mismatch", "ratio_max")
    by_lag = []
    for version, groups in enumerate(batches):
        row = updater.update(groups, version).to_dict()
        by_lag.append({"lag": row["max_lag"], **{key: row[key] for key in keys}})
        yield {"learning_rate": LAG_LEARNING_RATE, "by_lag": by_lag}


@torch.no_grad()
def _as_sampled(groups: list[RolloutGroup], engine: PlainEngine) -> list[RolloutGroup]:
    """Return the groups with the log-probabilities that the policy gives their tokens now."""
    return [
        replace(
            group,
            rollouts=[
                replace(rollout, behavior_logprobs=_logprobs(rollout, engine))
                for rollout in group.rollouts
            ],
        )
        for group in groups
    ]


def _logprobs(rollout: Any, engine: PlainEngine) -> list[float]:
    tokens = torch.tensor(rollout.token_ids)
    logprobs = engine.forward(tokens, torch.arange(len(tokens))).logprobs
    sampled = torch.tensor(rollout.loss_mask, device=logprobs.device)
    values: list[float] = torch.where(sampled, logprobs, 0.0).tolist()
    return values
