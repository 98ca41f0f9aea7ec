"""Supervised warm start: next-token likelihood of demonstrations, in one process."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from learner.batch.packing import pack
from learner.config.supervised import SftConfig
from learner.engine.protocol import TrainEngine
from learner.supervised import Progress


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration as token ids; the loss is on everything after the prompt."""

    token_ids: list[int]
    prompt_length: int


def tokenize(tokenizer: Any, prompt: str, completion: str) -> Example:
    """Return the ids of a prompt and its completion, closed by the end-of-sequence token."""
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    completion_ids = tokenizer.encode(completion, add_special_tokens=False)
    return Example([*prompt_ids, *completion_ids, tokenizer.eos_token_id], len(prompt_ids))


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
    """Take one optimizer step; return the mean loss over all completion tokens of the batch."""
    completion_tokens = sum(len(e.token_ids) - e.prompt_length for e in batch)
    total = 0.0
    for indices in pack([len(e.token_ids) for e in batch], capacity):
        members = [batch[i] for i in indices]
        token_ids = torch.tensor(list(chain.from_iterable(e.token_ids for e in members)))
        position_ids = torch.cat([torch.arange(len(e.token_ids)) for e in members])
        starts = torch.cat([torch.full((len(e.token_ids),), e.prompt_length) for e in members])
        completion = position_ids >= starts
        logprobs = engine.forward(token_ids, position_ids, completion).logprobs
        loss = -logprobs[completion.to(logprobs.device)].sum() / completion_tokens
        engine.backward(loss)
        total += float(loss.detach())
    engine.step()
    return total
