"""The command `plan`; what it works out is `deploy.planner.command`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.options import Overrides, Recipe, RunsDir
from deploy.runtime.signals import deferred


def plan(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    run: Annotated[
        str | None, typer.Option(help="A run whose parts are as fast: its folder or name.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    bounds: Annotated[str, typer.Option(help="Values of queues.max_staleness.")] = "0,1,2,4,8",
    devices: Annotated[
        int | None, typer.Option(help="For actors and learner; as the recipe has by default.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Sampled tokens of a rollout, on average.")
    ] = None,
    tokens_variation: Annotated[
        float, typer.Option(help="Their standard deviation over that (lognormal).")
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
    """Predict throughput and lag of a recipe, by bound and by split of the devices."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    with deferred():
        from deploy.planner import command as plan_command
        from deploy.storage.run_directory import RunDirectory
    wanted = plan_command.parse_bounds(bounds)
    document = plan_command.plan(
        config,
        run=None if run is None else RunDirectory.open(run, runs_dir),
        given=plan_command.PlanInputs(
            tokens=tokens,
            tokens_variation=tokens_variation,
            rollout_rate=rollout_rate,
            engine_rate=engine_rate,
            train_rate=train_rate,
            pause=pause,
        ),
        bounds=wanted,
        devices=devices,
    )
    if as_json:
        typer.echo(json.dumps(document))
    else:
        plan_command.show(document, Console())
