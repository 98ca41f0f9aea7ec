"""Arms of a benchmark: what they have in common, and how they are refused and gone on with.

What an arm does is `async_arm`'s, and its process `children`'s; which arms there are is each
benchmark's own.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from rich.console import Console

from benchmarks.harness.provenance import reserve
from benchmarks.harness.subprocesses import child
from deploy.config.loader import load_recipe
from deploy.config.run_config import ModelConfig, RunConfig
from deploy.errors import DeployError, InputError, Interrupted, RunFailed
from deploy.preflight.models import model_path
from deploy.preflight.provenance import ORIGIN_FILE, refuse_another_origin, warm_start_origin
from deploy.report.summary import WARM_UP
from deploy.storage.run_directory import RunDirectory
from queues.errors import QueuesError


def check_devices(config: RunConfig) -> None:
    """Refuses a recipe whose arms would not have equal devices.

    Raises:
        InputError: It says neither which cores nor how many GPUs actors and learner have.
    """
    if not (config.actors.gpus and config.learner.gpus):
        all_cores(config)


def all_cores(config: RunConfig) -> str:
    """The cores of actors and learner together.

    Raises:
        InputError: The recipe does not say which they are.
    """
    if config.actors.cores is None or config.learner.cores is None:
        raise InputError(
            "a comparison at equal cores needs actors.cores and learner.cores in the recipe"
        )
    return ",".join([*config.actors.cores, config.learner.cores])


def variant(base: RunConfig, name: str, **changes: dict[str, Any]) -> RunConfig:
    """The recipe of one arm.

    Args:
        base: What all arms share.
        name: Of the arm.
        changes: By section.

    Raises:
        InputError: The changes do not go together.
    """
    sections = {
        section: getattr(base, section).model_copy(update=keys) for section, keys in changes.items()
    }
    changed = base.model_copy(update={"name": name, **sections})
    try:
        return RunConfig.model_validate(changed.model_dump())
    except ValidationError as error:
        raise InputError(f"{name}: {error.errors()[0]['msg']}") from None


def finished(directory: RunDirectory, config: RunConfig) -> bool:
    """Whether an arm is there already, from the same recipe.

    Raises:
        InputError: It is there from another one.
    """
    if not directory.summary_file.exists():
        return False
    if directory.config() != config:
        raise InputError(
            f"{directory.path} was made from another recipe, checkout or warm start; name another "
            "--out"
        )
    return bool(json.loads(directory.summary_file.read_text())["status"] == "done")


def make_base(arguments: argparse.Namespace, name: str) -> RunConfig:
    """What all arms share: the recipe on its initial model, scored by checkpoints. Writes nothing.

    Args:
        arguments: With recipe, settings, steps, score_every, problems and out.
        name: Of the benchmark, for its folder.

    Raises:
        InputError: Something cannot be measured.
    """
    recipe = load_recipe(arguments.recipe, arguments.settings)
    check_devices(recipe)
    least = WARM_UP + 5
    steps = recipe.steps if arguments.steps is None else arguments.steps
    if steps < least or min(arguments.score_every, arguments.problems) < 1:
        raise InputError(
            f"--steps {steps} must be at least {least}, --score-every {arguments.score_every} and "
            f"--problems {arguments.problems} at least 1"
        )
    if recipe.heldout is None:
        raise InputError(f"recipe {arguments.recipe} has no [heldout] to score by")
    out = folder_of(arguments, recipe, name)
    size = min(arguments.problems, recipe.heldout.size)
    return recipe.model_copy(
        update={
            "steps": steps,
            "model": ModelConfig(path=initial_model(recipe, out)),
            "sft": None,
            "heldout": recipe.heldout.model_copy(
                update={"size": size, "final_size": arguments.problems}
            ),
            "learner": recipe.learner.model_copy(
                update={"checkpoint_every": arguments.score_every, "keep_checkpoints": steps}
            ),
            "deploy": recipe.deploy.model_copy(update={"runs_dir": out}),
        }
    )


def folder_of(arguments: argparse.Namespace, recipe: RunConfig, name: str) -> Path:
    """Where a benchmark keeps its arms: --out, or a folder of this moment beside the runs."""
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    out: Path = arguments.out or recipe.deploy.runs_dir / f"bench-{name}-{stamp}"
    return out.absolute()


def initial_model(recipe: RunConfig, out: Path) -> str:
    """The recipe's initial model: its own, or its warm start where one was made, or will be.

    Args:
        recipe: With or without [sft].
        out: Folder of the benchmark. A warm start in it is taken before one among the runs, since
            arms that are finished came from it.

    Raises:
        InputError: There is no such model, or `out` has a warm start of other settings.
    """
    if recipe.sft is None:
        return model_path(recipe)
    origin = warm_start_origin(recipe)
    for folder in (out, recipe.deploy.runs_dir):
        for file in sorted(folder.glob(f"*-sft/model/{ORIGIN_FILE}")):
            if file.read_text() == origin:
                return str(file.parent.absolute())
    deploy = recipe.deploy.model_copy(update={"runs_dir": out})
    made = recipe.model_copy(update={"deploy": deploy}).warm_start
    if made.exists():
        refuse_another_origin(made, origin, "name another --out")
    return str(made)


def make_start(arguments: argparse.Namespace, base: RunConfig, console: Console) -> None:
    """Makes the folder of a benchmark, and the warm start that is to be in it.

    Raises:
        RunFailed: The warm start could not be made.
    """
    out, model = base.deploy.runs_dir, Path(str(base.model.path))
    reserve(out / f"{base.name}.json")
    if model.is_relative_to(out) and not model.exists():
        options = [*arguments.settings, f"deploy.runs_dir={out}"]
        program = "from deploy.cli import main; main()"
        command = [sys.executable, "-c", program, "sft", arguments.recipe]
        with child([*command, *(part for o in options for part in ("--set", o))], None) as process:
            process.wait()
        if process.returncode:
            raise RunFailed("the warm start failed, for the reason above")
    console.print(f"every arm starts from {base.model.path}")


def numbers(text: str, option: str, or_else: str | None = None) -> tuple[str, ...]:
    """The whole numbers of a list on the command line, each once and without leading zeros.

    Args:
        text: Separated by commas.
        option: That was given it.
        or_else: A word that may stand for a number.

    Raises:
        InputError: There are none, or something else.
    """
    parts = text.split(",")
    if not all(part.isdecimal() or part == or_else for part in parts):
        shown = f" or {or_else!r}" if or_else else ""
        raise InputError(f"{option} {text!r}: give whole numbers{shown}, separated by commas")
    return tuple(dict.fromkeys(part if part == or_else else str(int(part)) for part in parts))


def end_well(command: Callable[[Console], None]) -> NoReturn:
    """Runs a command to its end; errors become one message and their exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(Console(highlight=False))
    except KeyboardInterrupt:
        print("headway: stopped by the user", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    except (DeployError, QueuesError) as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def commits(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was checked out when arms were measured, each once; "unknown" where nothing says so."""
    return sorted({(arm["environment"] or {}).get("commit") or "unknown" for arm in arms})


def show_conditions(document: Mapping[str, Any], console: Console) -> None:
    """Which arms failed, by which code the others ran, and how busy the machine was."""
    for each in document["failed"]:
        left_out = f"left out: seed {each['seed']}, {each['name']}: {each['why']}"
        console.print(left_out, markup=False)
    measured = commits(document["arms"])
    if measured != [document["commit"]]:
        console.print(
            f"arms were measured at commit {', '.join(measured)}; "
            f"this was written at {document['commit'] or 'unknown'}"
        )
    known = [arm["environment"] for arm in document["arms"] if arm["environment"]]
    if known:
        largest = max(each["machine"]["load_average"][0] for each in known)
        console.print(f"largest load average at an arm's start {largest:.1f}")
