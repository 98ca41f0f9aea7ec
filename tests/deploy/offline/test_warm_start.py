"""The folder of a warm start: never half of one, never two commands at once."""

import pytest

from deploy.config.loader import load_recipe
from deploy.offline import warm_start
from deploy.storage.atomic_folder import atomic_folder
from headway.errors import InputError


@pytest.fixture
def config(tmp_path):
    """Return the demo's recipe with a folder of runs of its own."""
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'runs'}"])


@pytest.fixture
def trains(monkeypatch):
    """Stands in for training: writes a model whose text is the next of a list, or raises it."""
    results = []

    def train(config, sft, pairs, terminal, partial, path):
        (partial / "config.json").write_text("half")
        result = results.pop(0)
        if isinstance(result, BaseException):
            raise result
        (partial / "config.json").write_text(result)

    monkeypatch.setattr(warm_start, "train_model", train)
    return results


class Silent:
    """A screen that shows nothing."""

    def say(self, text):
        """Nothing."""


def make(config, *, replace=False):
    return warm_start.warm_start(config, Silent(), replace=replace)


def test_a_replaced_model_is_the_new_one_and_nothing_else_is_left(config, trains):
    trains += ["old", "new"]
    make(config)
    folder = make(config, replace=True)
    assert (folder / "config.json").read_text() == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("ends", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_replacement_that_ends_early_leaves_the_old_model(config, trains, ends):
    trains += ["old", ends]
    folder = make(config)
    with pytest.raises(type(ends)):
        make(config, replace=True)
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_first_one_that_ends_early_leaves_nothing(config, trains):
    trains += [RuntimeError("no memory")]
    with pytest.raises(RuntimeError):
        make(config)
    assert not config.warm_start.parent.exists()


def test_what_exists_is_kept_unless_asked(config, trains):
    trains += ["old"]
    make(config)
    with pytest.raises(InputError, match="--replace"):
        make(config)
    assert (config.warm_start / "config.json").read_text() == "old"


def test_two_at_once_are_refused(config, trains):
    trains += ["first"]
    with (
        pytest.raises(InputError, match="another command is making"),
        atomic_folder(config.warm_start, replace=False),
    ):
        make(config)
    make(config)
    assert (config.warm_start / "config.json").read_text() == "first"
