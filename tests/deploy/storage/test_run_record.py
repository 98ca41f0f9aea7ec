"""The record of a resumed run has the figures of earlier sessions."""

import json
from dataclasses import asdict, replace

import pytest

from deploy.config.loader import load_recipe
from deploy.report.summary import summarise
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import restore
from headway.errors import InputError
from tests.deploy.trained import create, train
from weight_sync.announcements import WeightUpdateReport

UPDATE = WeightUpdateReport(engine_id="engine-0", version=0, published_at=1.0, bytes=7)


@pytest.fixture
def run(tmp_path):
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path}", "name=first", "steps=9"])
    directory = create(config)
    return config, directory


def test_a_new_run_has_no_past(run):
    record = restore(*run, now=100.0, say=print)
    assert (record.batches, record.swaps, record.heldout) == ([], [], [])
    assert record.seconds(101.5) == 1.5
    assert record.steps == 9


def test_batches_come_from_the_ledger_and_the_drivers_files_are_mended(run):
    config, directory = run
    train(directory, [{"loss": 0.5}, {"loss": 0.25}])
    append_rows(directory.path / "metrics.jsonl", [{"version": 0, "loss": 0.5}])
    append_rows(directory.path / "swaps.jsonl", [asdict(UPDATE)])
    with (directory.path / "swaps.jsonl").open("a") as file:
        file.write('{"version": 1, "byt')
    record = restore(config, directory, now=100.0, say=print)
    losses = [(batch.version, batch.report.loss) for batch in record.batches]
    assert losses == [(0, 0.5), (1, 0.25)]
    assert (record.version, record.swaps) == (2, [UPDATE])
    rows = directory.rows("metrics.jsonl")
    assert [(row["version"], row["loss"]) for row in rows] == losses
    assert directory.rows("swaps.jsonl") == [asdict(UPDATE)]


def test_seconds_tokens_and_scores_go_on_where_the_last_summary_ended(run):
    config, directory = run
    earlier = restore(config, directory, now=100.0, say=print)
    earlier.actors = [{"tokens_generated": 70, "idle_fraction": 0.5}]
    earlier.heldout.append({"version": 0, "score": 0.25, "seconds": 12.0})
    directory.write_summary(summarise(earlier, status="interrupted", now=130.0))
    assert directory.status() == "interrupted"

    record = restore(config, directory, now=1000.0, say=print)
    assert [row["version"] for row in record.heldout] == [0]
    record.actors = [{"tokens_generated": 5, "idle_fraction": 0.5}]
    summary = summarise(record, status="done", now=1010.0)
    assert summary["seconds"] == 40.0
    assert summary["tokens_generated"] == 75
    assert json.loads(json.dumps(summary["heldout"])) == [
        {"version": 0, "score": 0.25, "seconds": 12.0}
    ]


def test_restarts_are_counted_apart_by_what_was_made_again(run):
    config, directory = run
    train(directory, [{"loss": 0.5}])
    named = [
        *("actor-0", "reward-model", "actor-1", "actor-0", "learner", "broadcaster", "learner"),
        *("broker", "driver"),
    ]
    append_rows(directory.path / "restarts.jsonl", [{"actor": name} for name in named])
    away = [{"process": name, "at": 1.0, "seconds": 2.5} for name in named]
    append_rows(directory.path / "recoveries.jsonl", away)
    record = restore(config, directory, now=100.0, say=print)
    summary = summarise(replace(record, batches=[]), status="done", now=110.0)
    counts = {"actors": 3, "reward_models": 1, "learner": 2}
    counts |= {"broker": 1, "broadcaster": 1, "driver": 1}
    assert summary["restarts"] == counts
    assert summary["lost_seconds"] == {role: 2.5 * count for role, count in counts.items()}


def test_a_moved_run_finds_its_own_folder(run, tmp_path):
    config, directory = run
    moved = directory.path.rename(tmp_path / "elsewhere")
    assert RunDirectory(moved).config().deploy.runs_dir == tmp_path
    assert RunDirectory(moved).config().steps == config.steps


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("recipe.toml", b"", "prompts: is required"),
        ("recipe.toml", b"\xff\xfe", "cannot be read"),
        ("summary.json", b"{bad", "summary.json is damaged"),
        ("summary.json", b"[" * 90_000, "summary.json is damaged: RecursionError"),
        ("metrics.jsonl", b"[" * 90_000 + b"\n", "line 1 is damaged: RecursionError"),
        ("metrics.jsonl", b'{"version": 0}\n{bad\n{"version": 2}\n', "line 2 is damaged"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text, message):
    directory = RunDirectory(tmp_path)
    (tmp_path / name).write_bytes(text)
    read = {"recipe.toml": directory.config, "summary.json": directory.status}
    with pytest.raises(InputError, match=message) as refused:
        read.get(name, lambda: directory.rows(name))()
    assert "pydantic" not in str(refused.value)


@pytest.fixture
def trained(run):
    """Provide a run of two batches, with two updates and a summary, and what it said."""
    config, directory = run
    rows = [{"loss": 0.5, "published_at": 25.0}, {"loss": 0.25}]
    train(directory, rows)
    updates = [asdict(UPDATE), asdict(replace(UPDATE, version=1))]
    append_rows(directory.path / "swaps.jsonl", updates)
    scores = [{"version": 0, "score": 0.25, "seconds": 12.0}]
    figures = {"seconds": 130.0, "tokens_generated": 90, "seconds_to_first_step": 2.0}
    directory.write_summary({**figures, "heldout": scores, "heldout_sampled": []})
    assert restore(config, directory, now=100.0, say=pytest.fail).heldout == scores
    return config, directory, []


def test_damaged_lines_are_left_out_and_the_file_is_set_aside(trained):
    config, directory, said = trained
    path = directory.path / "swaps.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"version": 0', '"versoin": 0'))
    (directory.path / "waits.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n{"a"')
    record = restore(config, directory, now=200.0, say=said.append)
    assert [swap.version for swap in record.swaps] == [1]
    assert directory.rows("waits.jsonl") == [{"a": 1}, {"a": 3}]
    assert (directory.path / "aside-waits.jsonl").read_text().endswith('{"a"')
    assert "swaps.jsonl, line 1 is damaged; 1 intact records of 2 stay" in said[0]
    assert "waits.jsonl, line 2 is damaged" in said[1]
    assert restore(config, directory, now=200.0, say=pytest.fail).swaps == record.swaps


@pytest.mark.parametrize("change", ["remove", "cut", "flip"])
def test_a_damaged_summary_is_made_again_from_the_ledger(trained, change):
    config, directory, said = trained
    file = directory.summary_file
    text = file.read_text()
    if change == "remove":
        file.unlink()
    else:
        file.write_text(
            text[:100] if change == "cut" else text.replace('"score": 0.2', '"score": 0.9')
        )
    record = restore(config, directory, now=200.0, say=said.append)
    assert (record.earlier.seconds, record.heldout) == (30.0, [])
    assert record.earlier.tokens_generated == 2 * 2 * 2
    assert [
        f"{file} is {'missing' if change == 'remove' else 'damaged'}" in line for line in said
    ] == [True]
    assert (directory.path / "aside-summary.json").exists() == (change != "remove")


def test_a_ledger_that_lacks_batches_of_the_metrics_is_said_to_have_lost_its_end(trained):
    config, directory, said = trained
    append_rows(directory.path / "metrics.jsonl", [{"version": 2}])
    restore(config, directory, now=200.0, say=said.append)
    [line] = said
    assert f"{directory.ledger} ends at version 2, but metrics.jsonl has batch 2" in line
    assert [row["version"] for row in directory.rows("metrics.jsonl")] == [0, 1]


def test_a_line_of_restarts_that_was_cut_off_does_not_spoil_the_next_one(run):
    config, directory = run
    train(directory, [{"loss": 0.5}])
    append_rows(directory.path / "restarts.jsonl", [{"actor": "actor-0"}])
    with (directory.path / "restarts.jsonl").open("a") as file:
        file.write('{"actor": "act')
    assert restore(config, directory, now=100.0, say=print).restarts == {"actor-0": 1}
    append_rows(directory.path / "restarts.jsonl", [{"actor": "actor-1"}])
    assert restore(config, directory, now=200.0, say=print).restarts == {"actor-0": 1, "actor-1": 1}
