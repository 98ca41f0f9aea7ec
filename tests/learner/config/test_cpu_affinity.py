"""Cores are shared equally by ranks."""

import pytest
from pydantic import ValidationError

from learner.config.cpu_affinity import cores_of_rank, cpus_of, threads_of
from learner.config.learner import LearnerConfig


@pytest.mark.parametrize(
    ("cores", "ranks", "shares", "threads", "cpus"),
    [
        ("0-3", 2, [[0, 1], [2, 3]], 2, 2),
        ("0-3", 1, [[0, 1, 2, 3]], 4, 4),
        ("1", 2, [[1], [1]], 1, 0.5),
        (None, 2, [None, None], 1, 1),
    ],
)
def test_ranks_share_the_cores(cores, ranks, shares, threads, cpus):
    config = LearnerConfig(cores=cores, ranks=ranks)
    assert [cores_of_rank(config, rank) for rank in range(ranks)] == shares
    assert (threads_of(config), cpus_of(config)) == (threads, cpus)
    assert threads_of(config.model_copy(update={"threads": 7})) == 7


@pytest.mark.parametrize(
    ("cores", "message"),
    [("0-2", "3 cores, which ranks = 2 cannot share equally"), ("5-2", "cores = '5-2' is empty")],
)
def test_cores_that_cannot_be_shared_are_refused(cores, message):
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(cores=cores, ranks=2)
