"""The command `headway`.

Modules of the user are imported from the folder that the command runs in, after everything
installed. Commands import what they need when they run, so that `headway --help` is quick.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted after a checkpoint.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.agents import serve_tasks
from deploy.cli.arguments import Command
from deploy.cli.bench import BenchCommand, Group, bench
from deploy.cli.doctor import doctor
from deploy.cli.evaluation import evaluate
from deploy.cli.job_commands import attach, cancel, submit
from deploy.cli.recipes import init, plan, presets, try_recipe, validate
from deploy.cli.runs import capsule, export, replay, requeue, salvage, scale
from deploy.cli.shadowing import check_not_shadowed, only_informs
from deploy.cli.training import pairs, pipeline, prefer, resume, reward_model, run, sft
from deploy.cli.views import inspect, logs, ls, report, rollouts, top
from deploy.errors import Interrupted
from deploy.runtime import session_process
from deploy.runtime.output import keep_codes_to_terminals, open_standard_streams, use_utf8
from deploy.runtime.safe_console import SafeConsole, print_uncaught
from deploy.runtime.session_process import Session
from deploy.runtime.signals import raise_interrupts
from headway.errors import HeadwayError, InputError, first_line

STOPPED = "stopped by the user"

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models, with bounded staleness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, with bounded staleness."""
    if show:
        from importlib.metadata import version as installed

        typer.echo(installed("headway-rl"))
        raise typer.Exit


COMMANDS = (
    init, run, resume, scale, sft, prefer, pairs, reward_model, pipeline, ls, logs, rollouts,
    serve_tasks, requeue, salvage, submit, attach, cancel, doctor, validate, plan, try_recipe,
    presets, inspect, export, evaluate, report, top, replay, capsule,
)  # fmt: skip
NAMES = {try_recipe: "try", evaluate: "eval"}
"""Names of commands that Python has another use for."""
for command in COMMANDS:
    app.command(NAMES.get(command), cls=Command)(command)
app.command(
    cls=BenchCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(bench)


def main() -> Any:
    """Run the command line; print expected errors as one message and exit with their code."""
    process = None
    try:
        open_standard_streams()
        use_utf8()
        keep_codes_to_terminals()
        raise_interrupts()
        sys.excepthook = print_uncaught
        if not only_informs(sys.argv[1:]):
            check_not_shadowed()
            if sys.argv[1] in ("run", "resume"):
                process = session_process.begin_session(_end_leftovers, _import_session)
    except KeyboardInterrupt:
        _print_error(STOPPED)
        sys.exit(Interrupted.exit_code)
    except InputError as error:  # `SafeConsole` might import a package that is shadowed
        typer.echo(f"headway: {error}", err=True)
        sys.exit(error.exit_code)
    try:
        return _run_command(process)
    except SystemExit as leaving:
        if process is not None and not process.has_failed:
            code = leaving.code or 0
            process.ends(code if isinstance(code, int) else 1)
        raise


def _run_command(process: Session | None) -> Any:
    try:
        if process is not None:
            process.begin()
        sys.path.append(os.getcwd())
        return app(standalone_mode=True, obj=process)
    except (KeyboardInterrupt, SystemExit) as leaving:
        # typer turns the first into the second
        if isinstance(leaving, KeyboardInterrupt) or leaving.code == Interrupted.exit_code:
            _print_error(STOPPED + (process.hint if process is not None else ""))
            sys.exit(Interrupted.exit_code)
        raise
    except (HeadwayError, OSError) as error:
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        _print_error(str(error))
        if process is not None and code != Interrupted.exit_code and process.may_pass(error):
            process.fails(first_line(error))
        sys.exit(code)


def _end_leftovers(run: Path) -> None:
    """End what a killed session of a run has left, unless another command has the run by now."""
    from deploy.cluster.cleanup import end_leftovers
    from deploy.cluster.worker_logs import end_killed_session
    from deploy.storage.run_directory import RunDirectory
    from headway.file_lock import locked

    with suppress(OSError, HeadwayError), locked(run / session_process.DRIVER_LOCK):
        end_leftovers(run)
        end_killed_session(RunDirectory(run))


def _import_session() -> None:
    """Import what a session imports on its way to the first batch."""
    import deploy.preflight.inputs
    import deploy.session  # noqa: F401


def _print_error(message: str) -> None:
    SafeConsole(stderr=True).print(f"headway: {message}", soft_wrap=True)
