"""Commands that change a run or make something of it: its actors, its files, a copy, a replay."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.arguments import RunName, RunsDir
from deploy.runtime.safe_console import echo


def scale(
    run: RunName,
    actors: Annotated[int, typer.Option(min=1, help="Rollout actors from now on.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Change the number of rollout actors of a live run, which its recipe.toml keeps.

    It is to be called where the driver of the run is, since it writes to the run's folder.
    """
    from deploy.storage.run_directory import RunDirectory
    from deploy.storage.scaling import ask

    answer = ask(RunDirectory.open(run, runs_dir), actors)
    echo(
        f"actors.count: {answer['before']} → {actors}; actors that join load the model first, and "
        f"those that leave hand over what they sample; watch them by `headway top {run}`"
    )


def requeue(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    prompt: Annotated[
        list[str], typer.Option(metavar="ID", help="Only this prompt; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Put the failed prompts of a run back into its queue; then `headway resume` trains them."""
    from deploy.storage.run_directory import RunDirectory
    from headway.errors import InputError
    from queues.readers.accounting import read_accounting
    from queues.storage.ledger_repair import requeue as put_back

    directory = RunDirectory.open(run, runs_dir)
    with directory.held():
        config = directory.config()
        trainable = config.steps * config.prompts.groups_per_batch
        if read_accounting(directory.path).trained >= trainable:
            raise InputError(
                f"run {run!r} has trained all of its {config.steps} batches, so that failed "
                "prompts would not be generated; raise steps in its recipe.toml"
            )
        queued = put_back(directory.path, prompt or None)
    echo(f"{len(queued)} failed prompts are queued again; headway resume {run} trains them")


def salvage(run: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Take a run whose files are damaged back to the last state that is whole.

    What is given up is printed, and set aside in the folder of the run.
    """
    from deploy.storage.repair.salvage import salvage as take_back
    from deploy.storage.run_directory import RunDirectory

    directory = RunDirectory.open(run, runs_dir, without_recipe=True)
    take_back(directory, echo)
    echo(f"go on with: headway resume {directory.path}")


def export(
    run: RunName,
    to: Annotated[
        str, typer.Option(help="Folder to write, or address (s3://bucket/folder); must not exist.")
    ],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, for PEFT, not merged.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of an adapter's model, if it was moved."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Copy the newest checkpoint's model and tokenizer into a folder for transformers.

    An adapter is merged into its model, in the dtype that it was trained in.
    """
    from deploy.offline.export import export_folder, export_model
    from deploy.storage.run_directory import RunDirectory
    from learner.config.lora import stored_form

    directory = RunDirectory.open(run, runs_dir)
    with export_folder(to) as folder:
        exported = export_model(directory, folder, adapter=adapter, base=base)
        of = f", an adapter of {stored_form(folder)[1]}" if adapter else ""
    typer.echo(f"version {exported} in {to}{of}")


def replay(
    run: RunName,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Batches A to B−1.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train recorded batches of a run again and compare the weights; exit code 1 if they differ."""
    from deploy.offline import replay
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory

    batches = replay.parse_steps(steps)
    directory = RunDirectory.open(run, runs_dir)
    terminal = Terminal()
    if not replay.replay(directory, batches, terminal, terminal.console):
        raise typer.Exit(1)
