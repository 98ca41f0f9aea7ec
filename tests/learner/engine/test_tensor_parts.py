"""Tensors that several ranks write in parts are read in any other division."""

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.engine.tensor_parts import Part, PartReader, write_parts


def cuts_of(draw, size):
    """Return the borders of a division of `size` elements into runs of at least one."""
    return sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})


@given(data=st.data(), ranks=st.integers(1, 3), file_bytes=st.sampled_from([1, 40, 10_000]))
def test_any_run_of_any_tensor_is_read_back_whoever_wrote_which_part(data, ranks, file_bytes):
    tensors = {f"layers.{n}/weight": torch.randn(data.draw(st.integers(1, 30))) for n in range(3)}
    written = [[] for _ in range(ranks)]
    for name, values in tensors.items():
        cuts = cuts_of(data.draw, len(values))
        for start, end in pairwise(cuts):
            rank = data.draw(st.integers(0, ranks - 1))
            written[rank].append(Part(name, start, values[start:end]))
    with tempfile.TemporaryDirectory() as folder:
        for rank, parts in enumerate(written):
            write_parts(Path(folder), parts, rank=rank, ranks=ranks, file_bytes=file_bytes)
        reader = PartReader(Path(folder))
        assert reader.names == sorted(tensors)
        for name, values in tensors.items():
            start = data.draw(st.integers(0, len(values) - 1))
            count = data.draw(st.integers(1, len(values) - start))
            assert torch.equal(reader.read(name, start, count), values[start : start + count])


def test_dtypes_and_single_numbers_are_kept(tmp_path):
    values = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.tensor([7])}
    parts = [Part(name, 0, tensor) for name, tensor in values.items()]
    write_parts(tmp_path / "optimizer", parts, rank=0, ranks=1)
    reader = PartReader(tmp_path / "optimizer")
    assert reader.read("a", 1, 2).dtype == torch.bfloat16
    assert int(reader.read("b", 0, 1)) == 7


def test_what_is_missing_is_named(tmp_path):
    folder = tmp_path / "optimizer"
    with pytest.raises(InputError, match=r"optimizer/rank-0-of-1\.000\.safetensors is missing"):
        PartReader(folder)
    for rank in (0, 1):
        write_parts(folder, [Part("w", 4 * rank, torch.zeros(4))], rank=rank, ranks=3)
    with pytest.raises(InputError, match=r"rank-2-of-3\.000\.safetensors is missing"):
        PartReader(folder)
    write_parts(folder, [], rank=2, ranks=3)
    reader = PartReader(folder)
    assert len(reader.read("w", 0, 8)) == 8
    with pytest.raises(InputError, match="elements 8 to 9 of 'w' are missing"):
        reader.read("w", 2, 8)
    with pytest.raises(InputError, match="elements 0 to 0 of 'v' are missing"):
        reader.read("v", 0, 1)
