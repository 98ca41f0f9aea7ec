"""200 random damages to every file of a run: it goes on exactly, or the file is named.

The run is whole but for Ray and the model (`tests.deploy.lockstep`): its batches and weights are a
function of the prompts. Each damaged copy is resumed by what `headway resume` does before Ray
starts, then trained to its end, and compared bit by bit with the undamaged one.
"""

import os
import shutil
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.config.loader import load_recipe
from deploy.storage.jsonl import rewrite_rows
from deploy.storage.repair.whole_checkpoints import find_checkpoint
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import restore
from deploy.storage.sessions import begin_session, resumed_recipe
from headway.errors import HeadwayError, InputError
from queues.readers.accounting import read_accounting, read_batches
from queues.readers.checkpoints import committed_checkpoints
from queues.storage.ledger import Ledger
from tests.deploy.lockstep import (
    GROUPS,
    SIZE,
    STALENESS,
    STEPS,
    outcome,
    play,
    recorded_batch,
)
from tests.red_team.damage import damage

DAMAGES = 200
SEGMENT_BYTES = 10_000
"""Small, so that the journal has many files."""


class Outcome(NamedTuple):
    """The end of a damaged run: exact, rebuilt (with messages), or refused (with the error)."""

    kind: str
    text: str


def begin(directory, *, version):
    """Write what the driver of a session writes at its beginning; return the row of the session."""
    about = {"started_at": 1.0, "ray_logs": None}
    return begin_session(directory, directory.config(), about, version=version)


def write_files(directory):
    """Write the driver's files, as of what the ledger has."""
    batches = read_batches(directory.path)
    update = {"engine_id": "engine-0", "published_at": 1.0, "bytes": 7}
    for name, rows in (
        ("metrics", batches),
        ("swaps", [{**update, "version": row["version"]} for row in batches]),
        ("restarts", [{"actor": "actor-0", "at": 1.0}]),
        ("waits", [{"waiter": "learner", "seconds": 400.0}]),
        ("samples", [{"version": 0, "text": "7"}]),
        ("drift", [{"engine_id": "engine-0", "at": 1.0}]),
        ("probes", [{"engine_id": "engine-0", "version": 0, "difference": 0.0, "tolerance": 1.0}]),
    ):
        rewrite_rows(directory.path / f"{name}.jsonl", rows)
    figures = {"seconds": 130.0, "tokens_generated": 90, "seconds_to_first_step": 2.0}
    directory.write_summary(
        {"status": "running", "version": len(batches), **figures, "heldout": [],
         "heldout_sampled": []}
    )  # fmt: skip
    directory.page.write_text("<html></html>")
    (directory.logs / "driver.log").write_text("starting Ray\n")
    (directory.path / "targets.json").write_text("[]")


class Runs(NamedTuple):
    """A run that was killed, the same after its ledger was closed, and what it comes to."""

    killed: Path
    closed: Path
    expected: tuple[list, dict]
    """Batches, and weights by version, without interruption or damage."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    config = load_recipe(
        "demo",
        [f"deploy.runs_dir={root}", "name=first", f"steps={STEPS}",
         f"prompts.groups_per_batch={GROUPS}", f"prompts.group_size={SIZE}",
         f"queues.max_staleness={STALENESS}", "queues.filter_tied=true"],
    )  # fmt: skip
    directory = RunDirectory.of(config)

    def play_whole(moments=()):
        with directory.created(config, replace=directory.path.exists()):
            pass
        row = begin(directory, version=0)
        return play(patch, directory.path, moments, session=row, segment_bytes=SEGMENT_BYTES)

    with pytest.MonkeyPatch.context() as patch:
        checksums, crashes = play_whole()
        expected = outcome(directory.path), checksums
        _, crashes = play_whole([int(crashes.count * share / 50) for share in range(25, 50)])
    killed = next(copy for copy in crashes.copies if two_checkpoints_and_more(copy))
    closed = shutil.copytree(killed, root / "closed")
    Ledger(closed, synchronous="full").close()
    for folder in (killed, closed):
        (folder / "ledger.sqlite-shm").unlink(missing_ok=True)
        write_files(RunDirectory(folder))
    assert len({*checksums.values()}) == STEPS + 1, "every batch teaches something"
    return Runs(killed, closed, expected)


def two_checkpoints_and_more(folder):
    """Return True if a run has two checkpoints, and batches that were trained since."""
    saved = committed_checkpoints(folder)
    return len(saved) == 2 and len(read_batches(folder)) > max(saved)


def resume(patch, folder, messages):
    """Do what `headway resume` does, with everything in this process; return the checksums."""
    directory = RunDirectory.open(str(folder))
    directory.lock.check_at_rest()
    config, changes = resumed_recipe(directory, [])
    messages += map(str, changes)
    with directory.held():
        checkpoint = find_checkpoint(directory, messages.append)
        record = restore(config, directory, now=100.0, say=messages.append)
        row = begin(directory, version=record.version)
        assert [batch.version for batch in record.batches] == list(range(record.version))
        checksums, _ = play(
            patch, folder, start=lambda _: checkpoint, session=row, segment_bytes=SEGMENT_BYTES
        )
    return checksums


def expect_whole(folder, checksums, expected, damaged):
    """Compare a run that is at its end with the undamaged one.

    Old batches that nothing needed may be unreadable, if the damaged file is named.
    """
    batches, weights = expected
    for version, batch in enumerate(batches):
        if damaged.parts[:1] != ("journal",) or version >= min(checksums):
            assert recorded_batch(folder, version) == batch
            continue
        with suppress(InputError), naming(damaged):
            assert recorded_batch(folder, version) == batch
    assert checksums == {version: weights[version] for version in checksums}
    assert max(checksums) == STEPS
    recorded = {row["version"] + 1: row["weights_checksum"] for row in read_batches(folder)}
    assert recorded == {version: weights[version] for version in range(1, STEPS + 1)}
    accounts = read_accounting(folder)
    assert (accounts.balanced, accounts.trained_twice) == (True, 0)
    assert accounts.trained == STEPS * GROUPS


@contextmanager
def naming(damaged):
    """Let only such an InputError pass that names the damaged file."""
    try:
        yield
    except InputError as error:
        if damaged.name not in str(error):
            raise AssertionError(f"{damaged} is not named") from error
        raise


def play_damaged(patch, folder, expected, damaged=Path()):
    """Resume a run, of which a file is damaged; return what came of it."""
    messages: list[str] = []
    try:
        checksums = resume(patch, folder, messages)
    except HeadwayError as error:
        return Outcome("refused", str(error))
    expect_whole(folder, checksums, expected, damaged)
    return Outcome("rebuilt" if messages else "exact", "\n".join(messages))


def named(name: Path, text: str) -> bool:
    """Return True if a message names a file, or what it is a part of.

    A -wal file is a part of its database. Damage of the checksums shows in the files that they are
    of.
    """
    if name.parts[0] == "checkpoints":
        return name.parts[1] in text and (name.name in text or name.name == "checksums.json")
    return name.name.removesuffix("-wal") in text


def test_without_damage_it_goes_on_exactly_and_says_nothing(runs, tmp_path, monkeypatch):
    for folder in (runs.killed, runs.closed):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        assert play_damaged(monkeypatch, copy, runs.expected) == Outcome("exact", "")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_damaged_run_goes_on_exactly_or_names_the_file(runs, tmp_path, monkeypatch):
    outcomes: Counter[tuple[str, str]] = Counter()
    unnamed = []
    for seed in range(DAMAGES):
        folder = shutil.copytree(runs[seed % 2], tmp_path / "run")
        name, done = damage(folder, seed // 2 + seed % 2 * DAMAGES)
        try:
            end = play_damaged(monkeypatch, folder, runs.expected, name)
        except BaseException as error:
            error.add_note(f"seed {seed}: {name} {done}")
            raise
        if end.kind != "exact" and not named(name, end.text):
            unnamed.append((seed, name, done, end))
        outcomes[str(name.parent if name.parts[1:] else name), end.kind] += 1
        shutil.rmtree(folder)
    lines = [f"{place:40} {kind:8} {count}" for (place, kind), count in sorted(outcomes.items())]
    if table := os.environ.get("RED_TEAM_TABLE"):
        Path(f"{table}.damage").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    assert unnamed == []
    kinds = Counter(kind for _, kind in outcomes.elements())
    assert min(kinds[kind] for kind in ("exact", "rebuilt", "refused")) >= 10
