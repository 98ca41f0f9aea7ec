"""Commands about recipes: begin, check, plan or try one, list the presets."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.arguments import Overrides, Recipe, RunsDir, load, next_command
from deploy.runtime.safe_console import SafeConsole, echo
from deploy.runtime.signals import deferred
from headway.errors import InputError


def validate(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    strict: Annotated[
        bool, typer.Option("--strict", help="Import rewards and sources; check their options.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every key, with the defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every key as JSON.")] = False,
) -> None:
    """Check a recipe and print it as TOML: the keys that differ from the defaults.

    That is a recipe to start from: `headway validate demo > mine.toml`. The memory that it needs is
    printed to standard error, unless its model is a [model.tiny], and how its sequences will be
    computed; a recipe that cannot fit is refused.
    """
    config = load(recipe, overrides)
    if strict:
        from deploy.preflight.inputs import check_code

        check_code(config)
    if config.model.path is not None:
        from deploy.preflight.memory_check import check_memory

        check_memory(config, SafeConsole(stderr=True))
        from deploy.preflight.models import way_of_rows

        typer.echo(way_of_rows(config), err=True)
    from deploy.config.loader import short_text
    from deploy.config.recipe_text import recipe_text
    from deploy.config.rules import hardly_trains

    for note in hardly_trains(config):
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
    else:
        typer.echo(recipe_text(config) if everything else short_text(config), nl=False)


def plan(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    run: Annotated[
        str | None, typer.Option(help="A run to measure rates in: its folder or name.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    bounds: Annotated[str, typer.Option(help="Values of queues.max_staleness.")] = "0,1,2,4,8",
    devices: Annotated[
        int | None, typer.Option(help="Devices for actors and learner; default: the recipe's.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Mean number of sampled tokens of a rollout.")
    ] = None,
    tokens_variation: Annotated[
        float, typer.Option(help="Standard deviation over mean of these tokens (lognormal).")
    ] = 1.0,
    rollout_rate: Annotated[
        float | None, typer.Option(help="Tokens/s of an engine with one rollout.")
    ] = None,
    engine_rate: Annotated[
        float | None, typer.Option(help="Tokens/s with actors.max_concurrent_rollouts.")
    ] = None,
    train_rate: Annotated[
        float | None, typer.Option(help="Sampled tokens/s that one rank trains.")
    ] = None,
    pause: Annotated[float, typer.Option(help="Seconds that an update stops an engine.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict throughput and lag of a recipe, by bound and by split of the devices.

    The memory that it needs is printed too; a recipe that cannot fit is refused.
    """
    config = load(recipe, overrides)
    with deferred():
        from deploy.planner import plan as throughput
        from deploy.planner.caveats import slow_updates
        from deploy.preflight.memory_check import check_memory
        from deploy.storage.run_directory import RunDirectory
    console = SafeConsole(stderr=True)
    chosen = throughput.parse_bounds(bounds)
    measured = None if run is None else RunDirectory.open(run, runs_dir)
    memory = check_memory(config, console)
    document = throughput.plan(
        config,
        bounds=chosen,
        run=measured,
        given=throughput.PlanInputs(
            tokens=tokens,
            tokens_variation=tokens_variation,
            rollout_rate=rollout_rate,
            engine_rate=engine_rate,
            train_rate=train_rate,
            pause=pause,
        ),
        devices=devices,
        report=console.print,
    )
    if memory is not None:
        rate = document["best"]["samples_per_second"]
        document["notes"] += slow_updates(config, memory.version, memory.receivers, rate)
    if as_json:
        typer.echo(json.dumps({**document, "memory": memory and asdict(memory)}))
    else:
        throughput.show(document, SafeConsole())


def try_recipe(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to try, once each.")] = 3,
) -> None:
    """Play a few episodes with the model of a recipe and print them; trains nothing."""
    config = load(recipe, overrides)
    with deferred():
        from deploy.offline.try_recipe import before_warm_start, try_recipe
        from deploy.preflight.inputs import load_inputs
    made = config.sft is None or config.warm_start.exists()
    with nullcontext(config) if made else before_warm_start(config, echo) as tried:
        try_recipe(tried, load_inputs(tried, needs_space=False), prompts, echo)
    echo(next_command("run" if made else "sft", recipe, overrides))


def presets(
    name: Annotated[str | None, typer.Argument(help="The preset to show in full.")] = None,
) -> None:
    """List the algorithms that a recipe can name as its preset, or show one."""
    from deploy.config.loader import description, preset_names, preset_text

    if name is not None:
        typer.echo(preset_text(name))
        return
    for preset in preset_names():
        typer.echo(f"{preset:14} {description(preset).partition('). ')[0]})")


NAMES = ("my_task.toml", "my_task.py")
NEXT_STEPS = """\
{files} written; go on with:
  cd {folder}
  headway validate my_task.toml --strict
{sft}  headway try my_task.toml
  headway run my_task.toml"""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write, here by default.")] = Path(),
    *,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name that the recipe is to fit.")
    ] = None,
) -> None:
    """Write a recipe, a prompt source and a reward to start from; they train on a CPU.

    With --model the recipe fits that model and this machine, and says beside each key why.
    """
    targets = [folder / name for name in NAMES]
    if existing := [str(target) for target in targets if target.exists()]:
        raise InputError(f"{', '.join(existing)} exists; choose another folder, or delete it")
    contents = [(files("deploy") / "starter" / name).read_text() for name in NAMES]
    if model is not None:
        with deferred():
            from deploy.offline.model_recipe import recipe_for
        contents[0], notes = recipe_for(model)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, content in zip(targets, contents, strict=True):
            with target.open("x") as file:
                file.write(content)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    sft = "" if model else "  headway sft my_task.toml\n"
    written = " and ".join(map(str, targets))
    typer.echo(NEXT_STEPS.format(files=written, folder=folder, sft=sft))
