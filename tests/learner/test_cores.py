"""Cores are shared equally by ranks."""

import pytest

from learner.config import LearnerConfig
from learner.cores import cores_of, cores_of_rank, cpus_of, threads_of
from learner.errors import InputError


def test_a_list_of_cores_and_ranges_is_read():
    assert cores_of("5,0-2,1") == [0, 1, 2, 5]


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


def test_cores_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match=r"3 cores, which learner\.ranks = 2 cannot share equally"):
        threads_of(LearnerConfig(cores="0-2", ranks=2))
