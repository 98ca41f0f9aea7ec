"""Commands that change a run or make something of it: its actors, its files, a copy, a replay."""

import json
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.arguments import RunName, RunsDir, complete_keys, complete_runs
from deploy.runtime.safe_console import SafeConsole, echo, print_whole
from headway.errors import InputError


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
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder, its name in --runs-dir, or a capsule.",
            autocompletion=complete_runs,
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="A-B", help="Batches A to B; A:B leaves out B. Default: those of a capsule."
        ),
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Train with another setting of the learner too; those given are one variant.",
            autocompletion=complete_keys,
        ),
    ] = [],  # noqa: B006
    *,
    variant: Annotated[
        list[str],
        typer.Option(metavar="SETTINGS", help="'KEY=VALUE KEY=VALUE': another; may be repeated."),
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="Folder for a picture of the variants, and the figures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder of the model that a capsule only names.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train recorded batches of a run again and compare the weights; exit code 1 if they differ.

    With --set or --variant, train the same rollouts with other settings of the learner beside the
    run's own, and show how gradients and weights part.
    """
    from deploy.offline import capsule, replay, variants
    from deploy.runtime.console import Terminal

    chosen = [*([overrides] if overrides else []), *map(shlex.split, variant)]
    if (out or as_json) and not chosen:
        raise InputError("--out and --json show how variants part; add --set or --variant")
    terminal = Terminal(SafeConsole(stderr=as_json))
    batches = replay.parse_steps(steps) if steps is not None else None
    with capsule.opened(run, runs_dir, batches, model, terminal.say) as basis:
        if not chosen:
            equal = replay.replay(basis, terminal, terminal.console)
        else:
            recipes = variants.read_variants(basis, chosen)
            with redirect_stdout(sys.stderr if as_json else sys.stdout):  # libraries print too
                record = variants.compare_variants(basis, recipes, terminal)
            equal = record["equal"]
            if as_json:
                echo(json.dumps(record))
            else:
                print_whole(terminal.console, variants.table(record["batches"]))
                terminal.console.print("\n".join(variants.describe(record)), soft_wrap=True)
            if out is not None:
                variants.draw(record, out)
                terminal.say(f"figures and picture: {out}/replay.json, replay.svg and replay.png")
    if not equal:
        raise typer.Exit(1)


def capsule(
    run: RunName,
    steps: Annotated[str, typer.Option(metavar="A-B", help="Batches A to B; A:B leaves out B.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, which must not exist; RUN-A-B.capsule.")
    ] = None,
    weights: Annotated[
        Literal["value", "reference"],
        typer.Option(
            help="value: checkpoint and model; reference: the model's name and checksum, and all "
            "rollouts since the first batch."
        ),
    ] = "value",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Pack batches of a run into a file from which `headway replay` trains them anywhere."""
    from deploy.offline.capsule import pack
    from deploy.offline.replay import parse_steps
    from deploy.storage.run_directory import RunDirectory

    directory = RunDirectory.open(run, runs_dir)
    pack(directory, parse_steps(steps), out, by_value=weights == "value", say=echo)
