"""Failures of ranks are translated, and told apart by whether they are a root cause."""

import pickle

import pytest
import torch.distributed
from ray.exceptions import ActorDiedError, RayTaskError

from headway.errors import InputError
from learner.errors import RankFailed, TrainingDiverged
from learner.ranks.ray_calls import rank_failure


def raised(cause):
    """Return the error that a caller gets for one that a remote call raised."""
    return RayTaskError("update", "the traceback", cause)


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ActorDiedError(), True),
        (raised(InputError("no such model")), True),
        (raised(TrainingDiverged("nan")), True),
        (raised(ValueError("boom")), True),
        (raised(LOST), False),
        (raised(torch.distributed.DistBackendError("NCCL error: remote process exited")), False),
        (raised(torch.distributed.DistNetworkError("failed to recv")), False),
        (raised(torch.OutOfMemoryError("CUDA out of memory")), True),
        (raised(RuntimeError("The size of tensor a (3) must match")), True),
        (raised(rank_failure(2, raised(LOST))), False),
        (raised(rank_failure(1, ActorDiedError())), True),
        (raised(rank_failure(1, raised(TrainingDiverged("nan")))), True),
    ],
)
def test_a_lost_connection_is_no_root_cause(error, expected):
    assert rank_failure(0, error).is_root_cause is expected


def test_a_rank_that_died_is_told_from_one_that_raised():
    died = rank_failure(1, ActorDiedError())
    assert pickle.loads(pickle.dumps(died)).died
    assert rank_failure(0, raised(died)).died, "as rank 0 reports it"
    assert not rank_failure(0, raised(LOST)).died


def test_an_error_of_a_gpu_counts_as_a_death_and_a_lack_of_its_memory_does_not():
    fault = rank_failure(0, raised(torch.AcceleratorError("CUDA error: illegal memory access")))
    assert (fault.died, fault.is_root_cause) == (True, True)
    assert not rank_failure(0, raised(torch.OutOfMemoryError("CUDA out of memory"))).died


def test_the_root_cause_survives_pickling():
    sent = pickle.loads(pickle.dumps(rank_failure(2, raised(LOST))))
    assert isinstance(sent, RankFailed)
    assert (sent.is_root_cause, sent.exit_code) == (False, 1)


def test_a_failure_has_the_number_of_its_rank_and_the_text_and_exit_code_of_its_cause():
    died = rank_failure(0, ActorDiedError())
    assert str(died).startswith("rank 0 died: ")
    assert "\n" not in str(died)
    bad = rank_failure(1, raised(InputError("no such model")))
    assert (str(bad), bad.exit_code) == ("rank 1: no such model", 2)
    foreign = rank_failure(1, raised(ValueError("boom")))
    assert (str(foreign), foreign.exit_code) == ("rank 1: ValueError('boom')", 1)
    assert rank_failure(0, raised(bad)) is bad, "named once"
