"""The command `eval`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.arguments import Overrides, RunsDir, complete_recipes, complete_runs, load
from deploy.runtime.safe_console import SafeConsole, echo
from deploy.runtime.signals import deferred
from headway.errors import InputError
from headway.user_code import look_in


def evaluate(
    policy: Annotated[
        str,
        typer.Argument(
            help="A model folder or hub name, a run (its newest checkpoint), or RUN@VERSION.",
            autocompletion=complete_runs,
        ),
    ],
    suite: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose held-out sets, rewards and actors are used; a run's own by default.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    *,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Rollouts of each problem; one is greedy, for several pass@k."),
    ] = 1,
    best_of: Annotated[
        str | None,
        typer.Option(metavar="REWARD", help="Choose the best of k samples by this reward."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY", help="Another policy to compare with, by heldout.judge or rewards."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Score a model, or a version of a run, on held-out sets, with 95 % intervals."""
    with deferred():
        from deploy.offline.evaluate import evaluate as score
        from deploy.offline.evaluated_policy import find_policy
        from deploy.report.tables import show_scores
    policies = [find_policy(name, runs_dir) for name in (policy, against) if name is not None]
    run = policies[0].run
    if suite is not None:
        config = load(suite, overrides)
    elif run is not None:
        config = run.config(overrides)
        look_in(config.deploy.code_dir)
    else:
        raise InputError(
            f"{policy!r} is a model: say by --suite which recipe has the held-out sets"
        )
    say = partial(typer.echo, err=True)
    file, document = score(config, policies, samples=samples, best_of=best_of, say=say)
    if as_json:
        echo(json.dumps(document))
    else:
        show_scores(document, SafeConsole())
        echo(f"document: {file}")
