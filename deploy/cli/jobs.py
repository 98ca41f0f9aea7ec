"""The commands `submit`, `attach` and `cancel`: runs as jobs of a Ray cluster."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import Overrides, Recipe, Replace

Address = Annotated[str, typer.Option(help="Address of a cluster's dashboard: http://HEAD:8265.")]
Job = Annotated[str, typer.Argument(help="A job, as `headway submit` printed it.")]


def submit(
    recipe: Recipe,
    address: Address,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
    sft: Annotated[bool, typer.Option(help="Make the recipe's warm start first.")] = False,
    reward_model: Annotated[bool, typer.Option(help="Train its reward models first.")] = False,
    resume: Annotated[bool, typer.Option(help="Resume a run that was submitted before.")] = False,
    module: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="A module in this folder that yours import; may be repeated."
        ),
    ] = [],  # noqa: B006
    wait: Annotated[
        bool, typer.Option(help="Follow the job, and exit with its exit code.")
    ] = False,
) -> None:
    """Train a recipe as a job of a Ray cluster, with the modules that it names in this folder."""
    from deploy.config.loader import load_recipe, read_recipe

    config = load_recipe(recipe, overrides)
    from deploy.cluster.jobs import Jobs, check, command_of, files_of, resumption

    check(read_recipe(recipe, overrides))
    preparation = {"sft": sft, "reward-model": reward_model}
    before = [name for name, wanted in preparation.items() if wanted]
    if resume:
        command = resumption(config, overrides, replace=replace, before=before)
    else:
        command = command_of(recipe, overrides, replace=replace, before=before)
    modules = files_of(config, module, Path.cwd())
    file = Path(recipe) if Path(recipe).exists() else None
    job = Jobs(address).submit(config, command, modules, file)
    typer.echo(f"job {job}; follow it by: headway attach {job} --address {address}")
    if wait:
        raise typer.Exit(Jobs(address).follow(job, lambda text: typer.echo(text, nl=False)))


def attach(job: Job, address: Address) -> None:
    """Follow the log of a job and exit with its exit code; Ctrl-C does not stop the job."""
    from deploy.cluster.jobs import Jobs

    raise typer.Exit(Jobs(address).follow(job, lambda text: typer.echo(text, nl=False)))


def cancel(job: Job, address: Address) -> None:
    """Stop a job as Ctrl-C stops a run: it saves a checkpoint first."""
    from deploy.cluster.jobs import Jobs

    typer.echo(f"job {job}: {Jobs(address).cancel(job)}")
