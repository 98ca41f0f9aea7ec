"""Commands about jobs of a Ray cluster: submit one, follow it, stop it."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.arguments import Overrides, Recipe, Replace, load
from deploy.runtime.safe_console import echo

Address = Annotated[str, typer.Option(help="Address of a cluster's dashboard: http://HEAD:8265.")]
Job = Annotated[str, typer.Argument(help="A job, as `headway submit` printed it.")]


def submit(
    recipe: Recipe,
    address: Address,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
    sft: Annotated[bool, typer.Option(help="Make the recipe's warm start first.")] = False,
    prefer: Annotated[bool, typer.Option(help="Train on its preferences first.")] = False,
    reward_model: Annotated[bool, typer.Option(help="Train its reward models first.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Resume the run if it has begun; follow its job if that lives.")
    ] = False,
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
    config = load(recipe, overrides)
    from deploy.cluster.jobs import Jobs, check, command_of, files_of
    from deploy.config.loader import read_recipe

    check(read_recipe(recipe, overrides))
    preparation = {"sft": sft, "prefer": prefer, "reward-model": reward_model}
    before = [name for name, wanted in preparation.items() if wanted]
    command = command_of(recipe, overrides, replace=replace, resume=resume, before=before)
    modules = files_of(config, module, Path.cwd())
    file = Path(recipe) if Path(recipe).exists() else None
    jobs = Jobs(address)
    live = jobs.live_job(config) if resume else None
    job = live or jobs.submit(config, command, modules, file)
    echo(f"job {job}; follow it by: headway attach {job} --address {address}")
    if wait:
        attach(job, address)


def attach(job: Job, address: Address) -> None:
    """Follow the log of a job and exit with its exit code; Ctrl-C does not stop the job."""
    from deploy.cluster.jobs import Jobs

    raise typer.Exit(Jobs(address).follow(job, lambda text: echo(text, nl=False)))


def cancel(job: Job, address: Address) -> None:
    """Stop a job as Ctrl-C stops a run: it saves a checkpoint first."""
    from deploy.cluster.jobs import Jobs

    echo(f"job {job}: {Jobs(address).cancel(job)}")
