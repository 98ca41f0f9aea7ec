"""Supervised warm start: next-token likelihood of demonstrations, in one process.

A demonstration comes as token ids; text becomes ids where rollouts are rendered.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from learner.batch.packing import pack
from learner.config.supervised import SftConfig
from learner.engine.protocol import TrainEngine
from learner.supervised import Progress


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration as token ids."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens that are learned; the first never is, for nothing predicts it."""


def train_supervised(
    engine: TrainEngine,
    examples: Iterator[Example],
    config: SftConfig,
    report: Callable[[Progress], None],
) -> None:
    """Train `config.steps` steps on endless examples; call `report` after each step."""
    started, tokens = time.monotonic(), 0
    for step in range(config.steps):
        batch, size = [], 0
        while size < config.batch_tokens:
            batch.append(next(examples))
            size += len(batch[-1].token_ids)
        loss = _step(engine, batch, config.microbatch_tokens)
        tokens += size
        report(Progress(step + 1, config.steps, loss, tokens, time.monotonic() - started))


def _step(engine: TrainEngine, batch: list[Example], capacity: int) -> float:
    """Take one optimizer step; return the mean loss over all learned tokens of the batch."""
    learned_tokens = max(1, sum(sum(e.loss_mask[1:]) for e in batch))
    total = 0.0
    for indices in pack([len(e.token_ids) for e in batch], capacity):
        members = [batch[i] for i in indices]
        token_ids = torch.tensor(list(chain.from_iterable(e.token_ids for e in members)))
        position_ids = torch.cat([torch.arange(len(e.token_ids)) for e in members])
        learned = torch.tensor(list(chain.from_iterable(e.loss_mask for e in members)))
        learned &= position_ids > 0
        logprobs = engine.forward(token_ids, position_ids, learned).logprobs
        loss = -logprobs[learned.to(logprobs.device)].sum() / learned_tokens
        engine.backward(loss)
        total += float(loss.detach())
    engine.step()
    return total
