"""The learner's part of the suite: utilisation, by torch alone."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.synthetic_load import SIZES, Size, batch, build
from benchmarks.training.utilisation import ClockedEngine, utilisation_of
from headway.errors import HeadwayError
from learner.config.learner import LearnerConfig
from learner.engine.protocol import Forward
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import attend_packed
from learner.model.policy import Policy
from learner.update import Updater
from queues.records import RolloutGroup

ATTENTION = ("packed", "masked")
"""Sequence by sequence, as `attention = "sdpa"`; and with a mask over the microbatch, as in
transformers by default."""


class PlainEngine:
    """An engine of one process, one device and AdamW, with what an `Updater` calls."""

    rank, ranks, gathers = 0, 1, False

    learning_rate = 1e-6

    def __init__(self, policy: Policy) -> None:
        self.steps_taken = 0
        self.policy = policy
        self._weights: list[Tensor] = [p for p in policy.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in self._weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(self._masters, lr=self.learning_rate, fused=True)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._masters[0].device

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """See `TrainEngine.forward`."""
        columns = (token_ids, position_ids) if wanted is None else (token_ids, position_ids, wanted)
        return Forward(*self.policy(*(column.to(self.device) for column in columns)))

    def backward(self, loss: Tensor) -> None:
        """See `Trainable.backward`."""
        torch.autograd.backward(loss)
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None and master.grad is not None:
                master.grad.add_(weight.grad)
                weight.grad = None

    def step(self) -> float:
        """See `Trainable.step`."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, 1.0))
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


def make(size: Size, device: torch.device, *, packed: bool) -> PlainEngine:
    """Return an engine with random weights; raises `HeadwayError` where it cannot attend packed."""
    torch.manual_seed(0)
    with device:
        model = build(size).eval()
    # In float32, where rounding differs least.
    if packed and not attend_packed(model):
        raise HeadwayError("the model cannot attend sequence by sequence")
    policy = Policy(model.to(getattr(torch, size.dtype)), LogprobOptions(chunk=1024))
    return PlainEngine(policy)


def utilisation(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield tokens/s, and operations beside the best product, with each kind of attention.

    The slower one, with a mask, gets half as many rounds. Without pyarrow, batches are read as
    lists of Python instead of arrays, and the share is called `host_of_lists`.
    """
    size = SIZES[name]
    yield {"engine": "torch, without DeepSpeed"}
    groups = batch(size, seed=1)
    read, host = _reading(groups)
    config = LearnerConfig(microbatch_tokens=size.microbatch_tokens, dtype=size.dtype)
    result: dict[str, Any] = {}
    for kind in ATTENTION:
        packed = kind == "packed"
        free_memory(device)
        try:
            plain: Any = make(size, device, packed=packed)
            engine = ClockedEngine(plain, device)
            updater = Updater(engine, config)
            count = rounds if packed else (rounds + 1) // 2
            figures = utilisation_of(updater, engine, size, groups, read, rounds=count)
        except (torch.OutOfMemoryError, HeadwayError) as error:
            figures = {"failed": str(error).splitlines()[0]}
        else:
            figures["shares"][host] = figures["shares"].pop("host")
        result[kind] = figures | peak_memory(device)
        yield result
    measured = [result[kind] for kind in ATTENTION if "failed" not in result[kind]]
    yield {
        "claims": {
            "packed attention trains": "failed" not in result["packed"],
            "no product is faster than the best": all(0 < m["utilisation"] < 1 for m in measured),
        }
    }


def free_memory(device: torch.device) -> None:
    """Free what nothing refers to, and forget the largest use of memory so far."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the largest use of a GPU's memory since `free_memory`, in `bytes`."""
    return {"bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def _reading(groups: Sequence[RolloutGroup]) -> tuple[Callable[[], Sequence[RolloutGroup]], str]:
    """Return how a batch is read, and the name of its share of the time."""
    try:
        from queues.schema import decode_arrays, encode
    except ImportError:
        return (lambda: groups), "host_of_lists"
    payloads = [encode(group) for group in groups]
    return (lambda: decode_arrays(payloads)), "host"
