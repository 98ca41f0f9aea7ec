"""Sums: field by field, over parts and over ranks."""

from dataclasses import dataclass

import torch

from learner.sums import Sums


@dataclass(frozen=True)
class Inner(Sums):
    count: torch.Tensor


@dataclass(frozen=True)
class Outer(Sums):
    bins: torch.Tensor
    inner: Inner
    by_name: dict[str, torch.Tensor]
    missing: torch.Tensor | None = None


def outer(size):
    halves = torch.tensor([0.5, 1.5], requires_grad=True)
    return Outer(size * halves, Inner(torch.tensor(size)), {"kept": torch.tensor(size > 1).sum()})


def test_records_add_up_in_float64_without_a_gradient():
    total = outer(1) + outer(2)
    assert (total.bins.tolist(), total.inner.count.item()) == ([1.5, 4.5], 3)
    assert (total.by_name["kept"].item(), total.missing) == (1, None)
    assert (total.bins.dtype, total.bins.requires_grad) == (torch.float64, False)


def test_one_call_reduces_all_fields_over_ranks():
    asked = []
    total = outer(2).over_ranks(lambda flat: asked.append(flat) or 3 * flat)
    assert [flat.shape for flat in asked] == [(4,)]
    assert (total.bins.tolist(), total.inner.count.item()) == ([3.0, 9.0], 6)
    assert (total.by_name["kept"].item(), total.missing) == (3, None)
