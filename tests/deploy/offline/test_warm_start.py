"""The folder of a warm start, which is made as any atomic folder is, and its empty parent."""

import json
from itertools import count, islice
from pathlib import Path

import pytest

from actors.environments.protocol import Message
from deploy.config.loader import load_recipe
from deploy.offline import warm_start
from deploy.offline.stages import UnfinishedStage
from deploy.offline.warm_start import Demonstrations
from headway.errors import InputError
from learner.engine import checkpoint
from learner.supervised.row_training import Progress


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


def interrupted(config, sft, drawn, terminal, partial, path):
    """Write a checkpoint of step 2, and end as by Ctrl-C."""
    save(config.warm_start.parent / "unfinished", 2, tokens=9)
    raise KeyboardInterrupt


def save(root, step, tokens):
    checkpoint.prepare(root, step)
    state = checkpoint.State(
        version=step, saved_at=0.0, optimizer_steps=step, ranks=1, zero_stage=0, dtype="float32",
        cursor=None, totals={"tokens": tokens},
    )  # fmt: skip
    return checkpoint.finish(root, state)


def test_checkpoints_are_kept_for_the_same_recipe_on_any_ranks_and_refused_for_another(
    tmp_path, monkeypatch
):
    base = [f"deploy.runs_dir={tmp_path / 'runs'}", "sft.checkpoint_every=2"]
    monkeypatch.setattr(warm_start, "train_model", interrupted)

    def begin(*settings, replace=False):
        config = load_recipe("demo", [*base, *settings])
        with pytest.raises(KeyboardInterrupt):
            warm_start.warm_start(config, Silent(), replace=replace)
        return config.warm_start.parent / "unfinished"

    unfinished = begin()
    mark = unfinished / "mark"
    mark.touch()
    begin("sft.ranks=2", "sft.checkpoint_every=5")
    with pytest.raises(InputError, match=r"sft\.learning_rate = .*, not 0\.5.*--replace"):
        begin("sft.learning_rate=0.5")
    assert mark.exists()
    begin("sft.learning_rate=0.5", replace=True)
    assert not mark.exists()
    monkeypatch.setattr(warm_start, "train_model", lambda *_: None)
    config = load_recipe("demo", [*base, "sft.learning_rate=0.5"])
    folder = warm_start.warm_start(config, Silent(), replace=False)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def numbers():
    """Yield batches of two texts each, of 1 to 5 tokens."""
    return ([[0] * (1 + n % 5), [0]] for n in count())


def test_a_stage_goes_on_with_the_batches_and_losses_after_its_newest_whole_checkpoint(tmp_path):
    (save(tmp_path, 4, tokens=14) / "damage").touch()
    save(tmp_path, 2, tokens=5)
    rows = [{"step": step, "loss": 0.5} for step in (1, 2, 3)]
    (tmp_path / "losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = UnfinishedStage(tmp_path)
    assert (stage.checkpoint, stage.steps) == (tmp_path / "v000002", 2)
    assert [*stage.left(numbers(), 6)] == [*islice(numbers(), 2, 6)]
    stage.record(Progress(3, 0.25, 4, 1.0, heldout=(3, 0.75)))
    stage.record(Progress(4, 0.125, 9, 1.0, heldout=(3, 0.75)))
    assert [json.loads(line) for line in stage.losses.read_text().splitlines()] == [
        *rows[:2],
        {"step": 3, "loss": 0.25, "tokens": 9, "heldout_loss": 0.75},
        {"step": 4, "loss": 0.125, "tokens": 14, "heldout_loss": None},
    ]


def test_a_source_that_draws_other_demonstrations_after_an_interruption_is_refused(tmp_path):
    save(tmp_path, 2, tokens=6)
    with pytest.raises(InputError, match="6 tokens in 2 steps, and now they have 5"):
        UnfinishedStage(tmp_path).left(numbers(), 6)


def test_heldout_demonstrations_are_the_first_drawn_or_those_of_a_file_and_never_trained(tmp_path):
    rows = [{"prompt": f"{n}+0=", "completion": f"={n}"} for n in range(10)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3:5]))
    base = [f"sft.demonstrations={tmp_path}/all.jsonl", "sft.options={}"]

    def split(heldout):
        config = load_recipe("demo", [*base, f"sft.heldout={heldout}"])
        training, kept = warm_start._split(config, config.sft)
        trained = {prompt for prompt, _ in islice(training, 50)}
        assert trained == {row["prompt"] for row in rows} - {prompt for prompt, _ in kept}
        return kept

    assert split(f"{tmp_path}/some.jsonl") == [("3+0=", "=3"), ("4+0=", "=4")]
    assert len({*split(4)}) == 4
    with pytest.raises(InputError, match="in a row were held out; hold out fewer"):
        split(10)


def test_demonstrations_of_an_agent_are_its_conversations(monkeypatch):
    """They have the tokens of the environment `tools`, whose conversations are the same."""
    monkeypatch.chdir(Path(__file__).parents[3])
    agent, tools = load_recipe("examples/agent/agent.toml", []), load_recipe("tools", [])
    worked = [
        {"role": "user", "content": "12*34="},
        {"role": "assistant", "content": "[12*34]"},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "=408"},
    ]
    first, last = worked[:1], worked[1:]
    example = ([Message(**m) for m in first], [Message(**m) for m in last])
    shown = [Demonstrations(config, None).render(example) for config in (agent, tools)]
    assert shown[0] == shown[1]
