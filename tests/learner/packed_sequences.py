"""Random packed sequences in float64, and the same tokens as padded arrays."""

from types import SimpleNamespace

import numpy as np
import torch

from learner.losses import LossInputs

LENGTHS = (4, 3, 1, 5, 2, 2, 3, 4)
VERSION = 7


def one_row(logprobs, **changes):
    """Return tokens of one sequence that all train, over behaviour log-probabilities of 0."""
    here = logprobs.detach()
    columns = {
        "behavior_logprobs": torch.zeros_like(here),
        "advantages": torch.ones_like(here),
        "mask": torch.ones(len(here), dtype=torch.bool),
        "sequence_ids": torch.zeros(len(here), dtype=torch.int64),
    }
    return LossInputs(logprobs=logprobs, **columns | changes)


def sequences_of(sequences, **changes):
    """Return sequences of (ratios, advantage), over behaviour log-probabilities of 0."""
    ratios = torch.tensor([r for own, _ in sequences for r in own], dtype=torch.float64)
    names = torch.tensor([i for i, (own, _) in enumerate(sequences) for _ in own])
    advantages = torch.tensor([a for own, a in sequences for _ in own]).double()
    columns = {"advantages": advantages, "sequence_ids": names, "group_ids": names // 2}
    return one_row(ratios.log().requires_grad_(), **columns | changes)


def random_sequences(seed=0, *, proximal=False, spread=0.4):
    """Four groups of two sequences: pairs, a tie, and one that is masked out altogether.

    The first token of every sequence but the one-token one is a prompt; ids are not in order.
    """
    make = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    count, total = len(LENGTHS), int(lengths.sum())
    names = torch.tensor([40, 12, 5, 31, 8, 90, 2, 77])

    def noise(scale=spread):
        return scale * torch.randn(total, generator=make, dtype=torch.float64)

    current = -3 * torch.rand(total, generator=make, dtype=torch.float64) - 0.05
    of = torch.arange(count).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    mask = torch.rand(total, generator=make) < 0.85
    mask[starts] = False
    mask[starts[2]] = True
    mask[starts + lengths - 1] = True
    mask[of == 5] = False
    size = 0.5 + torch.rand(count, generator=make, dtype=torch.float64)
    advantages = size * torch.tensor([1, -1, -1, 1, 1, -1, 0, 0], dtype=torch.float64)
    groups = torch.tensor([3, 3, 1, 1, 9, 9, 4, 4])
    versions = torch.randint(VERSION - 3, VERSION + 1, (total,), generator=make)
    return LossInputs(
        logprobs=current.requires_grad_(),
        behavior_logprobs=current.detach() + noise(),
        advantages=advantages[of],
        mask=mask,
        sequence_ids=names[of],
        proximal_logprobs=current.detach() + noise(0.3) if proximal else None,
        reference_logprobs=current.detach() + noise(0.6),
        versions=torch.where(mask, versions, -1),
        group_ids=groups[of],
        version=VERSION,
        rewards=(advantages > 0).double()[of],
        entropies=torch.rand(total, generator=make, dtype=torch.float64).requires_grad_(),
    )


def sequence_mean(inputs, per_token):
    """Mean over sequences with tokens to train of the mean over their tokens."""
    means = [
        per_token[(inputs.sequence_ids == name) & inputs.mask].mean()
        for name in torch.unique(inputs.sequence_ids).tolist()
        if bool(((inputs.sequence_ids == name) & inputs.mask).any())
    ]
    return torch.stack(means).mean()


def pad(inputs):
    """Return sequences from `random_sequences` as [B, T] arrays, padded with nan.

    `unpack` makes such an array of [N], and `pack` the reverse.
    """
    places = [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]
    starts = [0, *np.cumsum(LENGTHS)[:-1]]

    def unpack(values):
        values = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
        padding = False if values.dtype == bool else np.nan
        array = np.full((len(LENGTHS), max(LENGTHS)), padding, dtype=type(padding))
        for place, value in zip(places, values, strict=True):
            array[place] = value
        return array

    proximal = inputs.proximal_logprobs
    return SimpleNamespace(
        frozen=unpack(inputs.logprobs),
        behavior=unpack(inputs.behavior_logprobs),
        proximal=None if proximal is None else unpack(proximal),
        reference=unpack(inputs.reference_logprobs),
        advantages=unpack(inputs.advantages),
        mask=unpack(inputs.mask),
        lags=unpack(inputs.version - inputs.versions),
        groups=inputs.group_ids[starts].tolist(),
        rewards=unpack(inputs.rewards),
        places=places,
        unpack=unpack,
        pack=lambda values: np.array([values[place] for place in places]),
    )
