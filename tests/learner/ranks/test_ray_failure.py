"""Of several ranks that fail, the one that is to blame is named."""

import pickle

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from learner.errors import InputError, RankFailed, TrainingDiverged
from learner.ranks.ray_failure import explains, failure


def raised(cause):
    """What a caller sees of an error that a remote call raised."""
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
        (raised(failure(2, raised(LOST))), False),
        (raised(failure(1, ActorDiedError())), True),
        (raised(failure(1, raised(TrainingDiverged("nan")))), True),
    ],
)
def test_a_lost_connection_does_not_explain_whoever_reports_it(error, expected):
    assert explains(error) is expected


def test_what_explains_survives_the_way_between_processes():
    sent = pickle.loads(pickle.dumps(failure(2, raised(LOST))))
    assert isinstance(sent, RankFailed)
    assert (sent.explains, sent.exit_code) == (False, 1)


def test_a_failure_has_the_number_of_its_rank_and_the_text_and_exit_code_of_its_cause():
    died = failure(0, ActorDiedError())
    assert str(died).startswith("rank 0 died: ")
    assert "\n" not in str(died)
    bad = failure(1, raised(InputError("no such model")))
    assert (str(bad), bad.exit_code) == ("rank 1: no such model", 2)
    foreign = failure(1, raised(ValueError("boom")))
    assert (str(foreign), foreign.exit_code) == ("rank 1: ValueError('boom')", 1)
    assert failure(0, raised(bad)) is bad, "named once"
