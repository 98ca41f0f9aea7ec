"""The commands that show runs, `ls`, `logs` and `rollouts`, and those that mend them."""

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.options import RunName, RunsDir
from deploy.runtime.safe_console import SafeConsole, echo


def ls(runs_dir: RunsDir = Path("runs")) -> None:
    """List the runs of a folder, the newest first."""
    from deploy.report.tables import show_runs
    from deploy.storage.run_directory import RunDirectory

    if runs := RunDirectory.all(runs_dir):
        show_runs(runs, SafeConsole())
    else:
        echo(f"no runs in {runs_dir}")


def logs(
    run: RunName,
    process: Annotated[
        str | None, typer.Argument(help="Its name, such as driver or actor-0; default: list them.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    *,
    lines: Annotated[int, typer.Option(min=1, help="Newest lines of each file.")] = 200,
) -> None:
    """Print the output of a process of a run, live or ended, or list what there is."""
    from deploy.cluster.worker_logs import logs_of, newest_lines
    from deploy.storage.run_directory import RunDirectory
    from headway.errors import InputError
    from headway.nearest_name import nearest

    directory = RunDirectory.open(run, runs_dir)
    files = logs_of(directory)
    if not files:
        raise InputError(f"run {run!r} has no output yet, in {directory.logs} or with Ray")
    if process is None:
        for name, file in files:
            echo(f"{file.stat().st_size:10,} bytes  {name:22} {file}")
        return
    chosen = [(name, file) for name, file in files if process in (name, Path(name).stem)]
    if not chosen:
        names = [*dict.fromkeys(Path(name).stem for name, _ in files)]
        raise InputError(
            f"run {run!r} has no output of {process!r}; there is {', '.join(names)}"
            f"{nearest(process, names)}"
        )
    for name, file in chosen:
        echo(f"== {name}: {file}")
        echo(newest_lines(file, lines))


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


def rollouts(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    version: Annotated[
        int | None, typer.Option(help="Version that they were trained at; default: the newest.")
    ] = None,
    sort: Annotated[
        Literal["reward", "length"] | None, typer.Option(help="Show the highest first.")
    ] = None,
    lowest: Annotated[
        bool, typer.Option("--lowest", help="Show the lowest first, of rewards by default.")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="Rollouts to print.")] = 3,
) -> None:
    """Print rollouts of a trained batch with prompts, rewards and lag, as text."""
    from deploy.observability.samples import heading, text_of
    from deploy.offline.rollouts import read_samples
    from deploy.storage.run_directory import RunDirectory

    samples = read_samples(RunDirectory.open(run, runs_dir), version)
    if sort or lowest:
        samples.sort(key=attrgetter("tokens" if sort == "length" else "reward"), reverse=not lowest)
    for sample in samples[:count]:
        echo(f"── {heading(sample)}\n{text_of(sample)}\n")


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
    from queues.storage.repair import requeue as put_back

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
