"""`headway bench NAME`: starts a benchmark from the folder that contains this package.

That is a checkout with all of them, or an installation with those about whole training runs.
"""

import ast
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from deploy.cli.arguments import Command, WithoutFlagTypes
from headway.errors import InputError

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "agents": "rollouts.agents",
    "async": "loop.async_gain",
    "chaos": "reliability.chaos",
    "checkpoint": "training.checkpoint",
    "episodes": "rollouts.slow_episodes",
    "generate": "rollouts.generate",
    "lora": "weights.lora",
    "metrics": "observability.metrics_cost",
    "peers": "loop.peers",
    "plan": "loop.plan_check",
    "presets": "loop.presets",
    "queue": "broker.queue",
    "rewards": "rollouts.reward_rate",
    "scale": "broker.scale",
    "staleness": "loop.staleness",
    "train": "training.train",
    "update-pause": "weights.update_pause",
    "weight-sync": "weights.weight_sync",
}
"""Modules of the folder `benchmarks`, by the name that the command gives them."""


def describe(root: Path = ROOT) -> str:
    """Return one line for each benchmark: its name and the first line of its docstring."""
    width, lines = shutil.get_terminal_size().columns, []
    for name, module in sorted(BENCHMARKS.items()):
        file = _file(root, module)
        text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
        about = (text or "needs a checkout").splitlines()[0]
        lines.append(f"{name:13} {textwrap.shorten(about, width - 14, placeholder='…')}")
    return "\n".join(lines)


class Group(WithoutFlagTypes, TyperGroup):
    """The commands of `headway`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` begin with; refuse another with the nearest name."""
        name = args[0]
        if name in self.commands or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from headway.nearest_name import nearest_name  # a user's `queues` may hide ours

        close = nearest_name(name, [*self.commands, *BENCHMARKS])
        benchmark = close in BENCHMARKS and close not in self.commands
        hint = f"; did you mean '{'bench ' if benchmark else ''}{close}'?" if close else ""
        raise InputError(f"no command {name!r}; `headway --help` lists them{hint}")


class BenchCommand(Command):
    """The command `headway bench`, whose help lists the benchmarks."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        typer.echo(describe())


def bench(
    name: Annotated[
        str,
        typer.Argument(help="One of the names below.", autocompletion=lambda: [*BENCHMARKS]),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments; `--help` lists them.")
    ] = None,
) -> None:
    """Run a benchmark of a checkout; `headway bench NAME --help` describes it."""
    start(name, arguments or [])


def start(name: str, arguments: list[str], root: Path = ROOT) -> NoReturn:
    """Replace this process by a benchmark, which gets Ctrl-C and sets the exit code."""
    if name not in BENCHMARKS:
        from headway.nearest_name import nearest

        names = sorted(BENCHMARKS)
        raise InputError(
            f"no benchmark {name!r}; there are {', '.join(names)}{nearest(name, names)}"
        )
    file = _file(root, BENCHMARKS[name])
    if not file.exists():
        raise InputError(
            f"{root} has no {file.relative_to(root)}: this benchmark comes with a checkout of the "
            "repository, not with the installed package"
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", name, *arguments], environment)


def _file(root: Path, module: str) -> Path:
    return (root / "benchmarks" / module.replace(".", "/")).with_suffix(".py")
