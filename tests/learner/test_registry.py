"""Finding functions by name and by dotted path."""

import sys
from types import ModuleType

import pytest
import torch

from headway.errors import InputError
from learner import compute_advantages
from learner.advantages.registry import Estimator
from learner.config.traits import AdvantageTraits
from learner.registry import Registry


@pytest.fixture
def user_module(monkeypatch):
    module = ModuleType("a_users_module")
    module.raw = Estimator("raw", lambda batch: batch.rewards * 2, AdvantageTraits())
    module.plain = lambda batch: batch.rewards
    monkeypatch.setitem(sys.modules, "a_users_module", module)


@pytest.mark.usefixtures("user_module")
def test_a_dotted_path_finds_a_decorated_function():
    result = compute_advantages("a_users_module:raw", torch.tensor([1.0]), torch.tensor([0]))
    assert result.values.tolist() == [2.0]


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a_users_module:plain", "is a function, not a registered advantage; put the decorator"),
        ("a_users_module:absent", "a_users_module has no 'absent'$"),
        ("a_users_module:rav", "a_users_module has no 'rav'; did you mean 'raw'"),
        ("no_such_module:raw", "No module named 'no_such_module'"),
        (":raw", "cannot load advantage ':raw'"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_says_why(path, message):
    with pytest.raises(InputError, match=message):
        compute_advantages(path, torch.tensor([1.0]), torch.tensor([0]))


def test_a_name_can_be_taken_once():
    registry = Registry("advantage", Estimator, {"raw": AdvantageTraits()})
    registry.built_in("raw")(lambda batch: batch.rewards)
    with pytest.raises(InputError, match="'raw' is already registered"):
        registry.built_in("raw")(lambda batch: batch.rewards)
