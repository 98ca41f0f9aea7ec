"""Ways to compute the sequences of a row, and their last hidden states by each.

A causal model computes a token from those before it, so that sequences that lie beside each other
and are filled up at their ends need no mask. The check of a model chooses the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headway.errors import InputError
from learner.model.packed_attention import BY_SEQUENCE, ends_of
from learner.model.shared_weights import is_shared

PADDING = 0.25
"""Largest share of the tokens of sequences beside each other that only fill them up."""


class Way(Enum):
    """Way to compute the sequences of a row, the fastest first; values are for messages.

    Tokens/s are those of `benchmarks/training` on a CPU, with the same model in each way.
    """

    PACKED = "packed into one row"
    BESIDE = "beside others of similar length (about 0.9 of the tokens/s of packed rows)"
    ALONE = "one after another (about 0.85 of the tokens/s of packed rows on a CPU, less on a GPU)"


class SequenceModel(nn.Module):
    """A causal model of transformers, and how it computes the sequences of a row."""

    output: str
    """Name of the first output, for messages."""
    way = Way.PACKED
    of_head = False
    """Take what the head is given in place of the last hidden states of the base model."""
    attentions: tuple[str, ...] = ()
    """Implementations of attention that may be chosen from; empty: the model's own."""
    context: int | None = None
    """Longest sequence of the engines in tokens, as `pin_rope` takes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def own(self, token_ids: Tensor) -> Tensor:
        """Return the end of the first output for one sequence, by transformers alone."""
        raise NotImplementedError

    def hidden_states(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the last hidden states [N, H] of sequences; positions restart at 0 with each.

        Where ranks share weights, all of them pass through the model equally often.
        """
        if self.way is Way.PACKED:
            # Ends as a tensor, since a block would be compiled anew for every list.
            by_sequence = self.model.config._attn_implementation in BY_SEQUENCE.values()
            more = {"sequence_ends": ends_of(position_ids)} if by_sequence else {}
            return self._states(token_ids[None], position_ids=position_ids[None], **more)[0]
        lengths: list[int] = ends_of(position_ids).diff().tolist()
        sequences = torch.split(token_ids, lengths)
        alone = [[i] for i in range(len(lengths))]
        groups = alone if self.way is Way.ALONE else side_by_side(lengths)
        most = most_passes(self.model, len(groups))
        states: dict[int, Tensor] = {}
        for group in groups:
            rows = pad_sequence([sequences[i] for i in group], batch_first=True)
            for i, row in zip(group, self._states(rows), strict=True):
                states[i] = row[: lengths[i]]
        idle = [self._states(token_ids[None, :1])[0, :0] for _ in range(most - len(groups))]
        return torch.cat([*(states[i] for i in range(len(lengths))), *idle])

    def _states(self, rows: Tensor, **columns: Any) -> Tensor:
        """Return the last hidden states [B, L, H] of token ids [B, L], in the model's dtype."""
        model = self.model
        if not self.of_head:
            if model.base_model is model:
                raise InputError(f"{type(model).__name__} names no base model, without its head")
            outputs = model.base_model(input_ids=rows, use_cache=False, **columns)
            states: Tensor = outputs.last_hidden_state
            return states.to(model.dtype)  # some models leave it to the head
        with _inputs_of(model.get_output_embeddings()) as inputs:
            model(input_ids=rows, use_cache=False, **columns)
        return inputs[-1].reshape(*rows.shape, -1)


def side_by_side(lengths: list[int]) -> list[list[int]]:
    """Group sequences by length, so that each group has at most `PADDING`; the longest first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[i] >= (1 - PADDING) * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def most_passes(model: Any, passes: int) -> int:
    """Return the most passes of any rank that shares the weights of this one."""
    if not is_shared(model):
        return passes
    most = torch.tensor(passes, device=model.device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


@contextmanager
def _inputs_of(head: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a head is given, and spare its products; they count as one word."""
    inputs: list[Tensor] = []

    def first_only(states: Tensor) -> Tensor:
        inputs.append(states)
        return states[..., :1]

    head.forward = first_only
    try:
        yield inputs
    finally:
        del head.forward  # the class's own again
