"""`headway capsule`: batches of a run in one file, from which anybody trains them again.

    run ─▶ recipe, ledger and journal of the batches, checkpoint, model ─▶ checksums ─▶ FILE
    FILE ─▶ its names, sizes and checksums compared ─▶ a folder that `replay` reads as a run

A capsule is a ZIP without compression, which never unpacks to more than its own size; its
`capsule.json` says what is in it. It has nothing that names the machine of the run but its kind,
and no prompts beside the tokens that were trained.
"""

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from deploy.config.recipe_text import recipe_text
from deploy.config.run_config import RunConfig
from deploy.offline.replay import Basis, find_basis
from deploy.runtime.machine import environment
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import read_sessions
from headway.atomic_file import atomic_file
from headway.clean_text import without_secrets_in
from headway.errors import InputError
from headway.folder_checksums import FILE_NAME, checksum_in, compute, damage_of, files_of
from learner.config.learner import LearnerConfig
from learner.config.lora import CONFIG_FILE
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_payload
from queues.storage import ledger_schema as schema
from queues.storage.journal import LOCATION, Journal, Location
from queues.storage.ledger_schema import IS_REMOVED
from queues.storage.row_checksums import register
from weight_sync.base_model import fingerprint_of_weights, folder_of

DESCRIPTION, FORMAT, SUFFIX = "capsule.json", 1, ".capsule"
LIBRARIES = ("headway-rl", "torch", "deepspeed", "transformers", "numpy")
"""Packages that the bits of trained weights may depend on."""
_BATCHES = "version >= ? AND version < ?"
_GROUPS = f"group_id IN (SELECT group_id FROM batch_groups WHERE {_BATCHES})"
COPIED = {
    "groups": ("number, group_id, prompt_id, purpose, '{}' AS prompt, state, issued_at", _GROUPS),
    "batches": ("version, taken_at, acked_at, statistics", _BATCHES),
    "batch_groups": ("version, position, group_id", _BATCHES),
    "results": (
        f"group_id, {IS_REMOVED} AS removed, {LOCATION}, attempt, rollouts, tokens, reward, "
        "accepted_at",
        _GROUPS,
    ),
}
"""Columns of the ledger's tables that are packed, and the condition for versions from a to b."""
Say = Callable[[str], None]


def pack(
    directory: RunDirectory, steps: tuple[int, int], out: Path | None, *, by_value: bool, say: Say
) -> None:
    """Write batches of a run that rests into a new file.

    `by_value`, they begin with the checkpoint before them, which is packed with the initial model;
    otherwise with the model, of which only name and checksum are packed, and all batches since.

    Raises InputError if the file exists or something that is needed is gone.
    """
    out = out or Path(f"{directory.path.name}-{steps[0]}-{steps[1] - 1}{SUFFIX}")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    if out.exists():
        raise InputError(f"{out} exists; name another file by --out")
    basis = find_basis(directory, steps, from_checkpoint=by_value)
    _refuse_other_models(basis.config.learner)
    with tempfile.TemporaryDirectory(prefix="headway-capsule-") as scratch:
        program, files = _files_to_pack(basis, Path(scratch), by_value=by_value)
        size = sum(path.stat().st_size for path in files.values())
        if (free := shutil.disk_usage(out.absolute().parent).free) < size:
            raise InputError(f"{out} would have {size:,} bytes, and its disk {free:,} left")
        say(f"packing {len(files)} files of {size:,} bytes into {out}")
        names = {str(path): name for name, path in files.items()}
        checksums = {names[path]: text for path, text in compute(Path("/"), names).items()}
        name = "/".join(Path(basis.model).parts[-2:])
        description = {
            "format": FORMAT,
            "run": directory.path.name,
            "steps": [basis.plan.first, basis.plan.end],
            "model": {"name": name, "checksum": fingerprint_of_weights(basis.model)},
            "program": program,
            "checksums": checksums,
        }
        with (
            atomic_file(out, durable=True) as file,
            ZipFile(file, "w", ZIP_STORED, strict_timestamps=False) as archive,
        ):
            archive.writestr(DESCRIPTION, json.dumps(description, indent=1))
            for name, path in files.items():
                archive.write(path, name)
    for needed in _code_of(basis.config.learner):
        say(f"not packed, and needed where it is replayed: your {needed}")
    say(f"{out}: {out.stat().st_size:,} bytes; go on with: headway replay {out}")


def _files_to_pack(
    basis: Basis, scratch: Path, *, by_value: bool
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return program and machine of the run, and the files of a capsule by their names in it.

    Those that are not packed as they are, are written into `scratch`.
    """
    folder, checkpoint = folder_of(basis.model), basis.plan.checkpoint
    if folder is None:
        raise InputError(f"the model {basis.model!r} is not on this machine; fetch it first")
    program = _copy_batches(basis, scratch)
    files = {name: scratch / name for name in files_of(scratch)}
    if by_value:
        files |= {f"model/{name}": folder / name for name in _files_of_model(folder)}
    if checkpoint is not None:
        own = _portable_checkpoint(checkpoint, scratch / "saved")
        files |= {f"checkpoints/{checkpoint.name}/{name}": own[name] for name in own}
    return program, files


def _refuse_other_models(learner: LearnerConfig) -> None:
    others = {
        "learner.kl.reference": learner.kl and learner.kl.reference,
        "learner.critic.path": learner.critic and learner.critic.path,
        "learner.lora.path": learner.lora and learner.lora.path,
        "learner.distillation.teachers": learner.distillation,
    }
    if named := [key for key, value in others.items() if value]:
        raise InputError(f"a capsule has one model, and the run reads others: {', '.join(named)}")


def _code_of(learner: LearnerConfig) -> list[str]:
    """Return the functions of the user's own that batches are trained with."""
    return [name for name in (learner.advantage, learner.loss, *learner.corrections) if ":" in name]


def _files_of_model(folder: Path) -> list[str]:
    """Return the files of a model folder, without those that say how it was made."""
    from learner.engine.model_folder import OWN

    return [name for name in files_of(folder) if name not in OWN]


def _copy_batches(basis: Basis, folder: Path) -> dict[str, Any]:
    """Write recipe, ledger and journal of the batches; return program and machine of the run."""
    plan, run = basis.plan, basis.directory.path
    sessions = read_sessions(basis.directory, plan.end - 1)
    program = {key: sessions[-1][key] for key in ("python", "packages", "machine")}
    del program["machine"]["host"]
    journal = Journal(folder / schema.JOURNAL_NAME, segment_bytes=2**30)
    new = sqlite3.connect(folder / schema.FILE_NAME, isolation_level=None)
    with open_ledger(run) as old, closing(new):
        old.row_factory = sqlite3.Row
        register(new)
        schema.create_tables(new)
        new.execute("BEGIN")

        def insert(table: str, row: Mapping[str, Any]) -> None:
            holes = ", ".join("?" * len(row))
            new.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({holes})", [*row.values()])

        for table, (columns, span) in COPIED.items():
            query = f"SELECT {columns} FROM {table} WHERE {span}"
            for row in map(dict, old.execute(query, (plan.start, plan.end)).fetchall()):
                if table == "results":
                    name, location = (
                        f"group {row['group_id']}",
                        [row[key] for key in Location._fields],
                    )
                    payload = read_payload(run, name, row.pop("removed"), *location)
                    row |= journal.append(payload)._asdict()
                insert(table, row)
        for number, session in enumerate(sessions):
            row = {"version": session["version"], "recipe": _portable_recipe(session["recipe"])}
            insert("meta", {"key": f"{schema.SESSION}{number:06d}", "value": json.dumps(row)})
        if plan.checkpoint is not None:
            path = f"checkpoints/{plan.checkpoint.name}"
            insert("checkpoints", {"version": plan.start, "path": path, "at": 0.0})
        new.execute("COMMIT")
    journal.close()
    recipe = RunConfig.model_validate_json(json.dumps(row["recipe"]), strict=True)
    (folder / "recipe.toml").write_text(recipe_text(recipe))
    return program


def _portable_recipe(recipe: Mapping[str, Any]) -> Any:
    """Return the settings of a session without secrets, and without those of its machine."""
    threads = LearnerConfig.model_validate(recipe["learner"]).threads_of_rank
    learner = {**recipe["learner"], "cores": None, "threads": threads}
    sync = {**recipe["weight_sync"], "transport": "shared_memory", "folder": None}
    portable = {**recipe, "learner": learner, "weight_sync": sync, "deploy": {}}
    return _without_folders(without_secrets_in(portable))


def _without_folders(value: Any) -> Any:
    """Return a value of JSON's types with the last name alone of every absolute path."""
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and value[:1] in ("/", "~") else value


def _portable_checkpoint(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by name; one that names the folder of a model is made anew.

    Raises InputError if the checkpoint is damaged.
    """
    if problem := damage_of(checkpoint):
        raise InputError(f"the checkpoint {checkpoint} is damaged: {problem}")
    files = {name: checkpoint / name for name in files_of(checkpoint)}
    adapters = [name for name in files if Path(name).name == CONFIG_FILE]
    for name in adapters:
        text = json.dumps(_without_folders(json.loads(files[name].read_bytes())))
        files[name] = folder / name
        files[name].parent.mkdir(parents=True, exist_ok=True)
        files[name].write_text(text)
    folder.mkdir(exist_ok=True)
    checksums = json.loads((checkpoint / FILE_NAME).read_bytes()) | compute(folder, adapters)
    (folder / FILE_NAME).write_text(json.dumps(checksums))
    return files | {FILE_NAME: folder / FILE_NAME}


@contextmanager
def opened(
    run: str, runs_dir: Path, steps: tuple[int, int] | None, model: str | None, say: Say
) -> Iterator[Basis]:
    """Find what batches of a run, or of a capsule, are trained again from, during the block.

    `model` is the folder of the initial model, where it is not found by itself.
    """
    if not Path(run).is_file():
        if Path(run).suffix == SUFFIX:
            raise InputError(f"{run} is no file")
        if steps is None:
            raise InputError("--steps is missing: name batches, as in 10:20")
        yield find_basis(RunDirectory.open(run, runs_dir), steps, model=model)
        return
    with tempfile.TemporaryDirectory(prefix="headway-capsule-") as scratch:
        folder = Path(scratch) / Path(run).stem
        description = unpack(Path(run), folder)
        named, packed = description["model"], folder / "model"
        if packed.exists() and model:
            raise InputError(f"--model {model}: {run} has its model, and is replayed with that")
        model = str(packed) if packed.exists() else model or named["name"]
        if not packed.exists() and fingerprint_of_weights(model) != named["checksum"]:
            raise InputError(
                f"{run} was trained from the model {named['name']!r} ({named['checksum']}), and "
                f"{model!r} is not here or another one; name its folder by --model"
            )
        basis = find_basis(RunDirectory(folder), steps or tuple(description["steps"]), model=model)
        for difference in _differences(description["program"], environment()):
            say(f"bits may differ for another {difference}")
        for needed in _code_of(basis.config.learner):
            say(f"its author's {needed} must be importable from here")
        yield basis


def unpack(file: Path, folder: Path) -> dict[str, Any]:
    """Write the files of a capsule into a folder, when all are known to be whole.

    Returns its description. Raises InputError that names what is wrong.
    """
    try:
        with ZipFile(file) as archive:
            description = _checked(archive, file.stat().st_size)
            archive.extractall(folder)
    except (BadZipFile, ValueError, KeyError, TypeError, RuntimeError, EOFError) as error:
        raise InputError(f"{file} is no whole capsule, and was not unpacked: {error}") from None
    return description


def _checked(archive: ZipFile, size: int) -> dict[str, Any]:
    """Return the description of a capsule of so many bytes; ValueError for what it may not have."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    for name, entry in entries.items():
        if "\\" in name or {"", ".", ".."} & {*name.split("/")} or not name.isprintable():
            raise ValueError(f"{name!r} would be written elsewhere")
        if entry.compress_type != ZIP_STORED:
            raise ValueError(f"{name!r} is compressed")
    if sum(entry.file_size for entry in archive.infolist()) > size:
        raise ValueError("its files would be larger than itself")
    description: dict[str, Any] = json.loads(archive.read(DESCRIPTION))
    if description["format"] != FORMAT:
        raise ValueError(f"its format is {description['format']}, this Headway reads {FORMAT}")
    checksums = description["checksums"]
    if wrong := sorted({*checksums, DESCRIPTION} ^ {*entries}):
        raise ValueError(f"{wrong[0]} is missing, or was added")
    for name, checksum in checksums.items():
        with archive.open(name) as content:
            if checksum_in(cast("BufferedIOBase", content)) != checksum:
                raise ValueError(f"{name} is not as it was packed")
    return description


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe how program and machine of a run differ from those here."""
    facts = [
        {"processor": of["machine"]["cpu"], "GPU": of["machine"]["gpus"], "Python": of["python"],
         **{name: of["packages"].get(name) for name in LIBRARIES}}
        for of in (there, here)
    ]  # fmt: skip
    return [
        f"{name}: {value} there, {facts[1][name]} here"
        for name, value in facts[0].items()
        if value != facts[1][name]
    ]
