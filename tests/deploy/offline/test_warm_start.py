"""The folder of a warm start, which is made as any atomic folder is, and its empty parent."""

import pytest

from deploy.config.loader import load_recipe
from deploy.offline import warm_start
from headway.errors import InputError


class Silent:
    """A screen that shows nothing."""

    def say(self, text):
        """Nothing."""


def test_one_that_ends_early_leaves_nothing_and_one_that_exists_stays(tmp_path, monkeypatch):
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'runs'}"])
    results = [RuntimeError("no memory"), None]

    def train(config, sft, pairs, terminal, partial, path):
        (partial / "config.json").write_text("half")
        if (error := results.pop(0)) is not None:
            raise error

    monkeypatch.setattr(warm_start, "train_model", train)
    with pytest.raises(RuntimeError):
        warm_start.warm_start(config, Silent(), replace=False)
    assert not config.warm_start.parent.exists()
    folder = warm_start.warm_start(config, Silent(), replace=False)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    with pytest.raises(InputError, match="--replace"):
        warm_start.warm_start(config, Silent(), replace=False)
