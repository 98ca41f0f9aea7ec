"""The example of `learner/README.md` runs as it stands there."""

import re
import sys
from pathlib import Path

import pytest
from rollouts import PlainEngine, random_groups

import learner
from headway.errors import InputError
from headway.registry import Registry
from learner.config.learner import LearnerConfig
from learner.config.objective_rules import corrects_off_policyness
from learner.config.traits import ESTIMATORS, LOSSES
from learner.update import Updater

README = (Path(learner.__file__).parent / "README.md").read_text()
OWN = {"advantage": "my_objective:median", "loss": "my_objective:soft_clip"}


@pytest.fixture(autouse=True)
def my_objective(tmp_path, monkeypatch):
    """Write the module of the example where a user would have it; forget it afterwards."""
    [example] = re.findall(r"```python\n(# my_objective.py.*?)```", README, flags=re.DOTALL)
    (tmp_path / "my_objective.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    LOSSES.forget(["soft_clip"])
    ESTIMATORS.forget(["median"])
    sys.modules.pop("my_objective", None)


def test_it_trains_with_its_options_and_figures():
    engine = PlainEngine()
    updater = Updater(engine, LearnerConfig(**OWN, loss_options={"width": 0.1}))
    found = updater.update(random_groups(), 0)
    assert engine.gradient.norm() > 0
    assert 0 < found.fractions["faded"] <= 1


def test_it_is_held_to_the_checks_of_built_in_ones():
    with pytest.raises(InputError, match="no option wide; its options: width"):
        Updater(PlainEngine(), LearnerConfig(**OWN, loss_options={"wide": 1}))
    with pytest.raises(InputError, match="would count it twice"):
        Updater(PlainEngine(), LearnerConfig(**OWN, correction="tis"))
    own = LearnerConfig(**OWN)
    assert corrects_off_policyness(own, own.traits_by(Registry.load))


def test_what_makes_no_numbers_of_made_up_rollouts_is_refused():
    with pytest.raises(InputError, match=r"soft_clip' made .*nan.* must be two finite numbers"):
        Updater(PlainEngine(), LearnerConfig(**OWN, loss_options={"width": 0.0}))
