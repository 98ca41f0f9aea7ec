"""Agents through the gateway of a rollout actor, beside the engine alone with the same prompts.

    headway bench agents [--sessions 64]

In each round unmodified clients of OpenAI (streaming and not) and Anthropic (streaming and not), in
a process of their own, play conversations of several turns with a tool; then the engine samples as
many tokens after the very same prompts in this process, without rendering, parsing or clients. The
model has learnt the form of the calls before. The figures of merit: tokens that were tokenised
again (aim 0), sampled tokens with a log-probability and a version (aim: all), the largest
difference of log-probabilities to those of the learner's model (aim 1e-4), and the median of the
ratio of tokens/s inside a round (aim 0.9). Takes about four minutes.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study

AIM, TOLERANCE = 0.9, 1e-4
COUNTED = ("prompts", "retokenised", "would_differ", "segments", "sampled", "stamped")


class AgentsOptions(Options):
    """Options of `headway bench agents`."""

    rounds: Annotated[int, typer.Option(min=1, help="Of agents, and of the engine alone.")] = 5
    sessions: Annotated[int, typer.Option(min=4, help="Agents at once.")] = 64


def figures_of(rounds: Sequence[Record]) -> Record:
    """Return sums over rounds, and medians of the rates and of their ratio inside each."""
    return {
        **{name: sum(row[name] for row in rounds) for name in COUNTED},
        "logprob_difference": max(row["logprob_difference"] for row in rounds),
        "tokens_per_second": {
            name: median(row["sampled"] / row[name] for row in rounds)
            for name in ("gateway", "alone")
        },
        "of_alone": median(row["alone"] / row["gateway"] for row in rounds),
        "raw": [*rounds],
    }


def measure(options: AgentsOptions) -> Iterator[Record]:
    from benchmarks.rollouts.agent_rounds import measure_rounds

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        yield figures_of(
            asyncio.run(measure_rounds(options.rounds, options.sessions, Path(folder)))
        )


def table(record: Record) -> str:
    rates = record["tokens_per_second"]
    return (
        f"{record['retokenised']} tokens tokenised again in {record['prompts']} prompts "
        f"({record['would_differ']} would differ as texts, {record['segments']} began anew)\n"
        f"{record['stamped'] / record['sampled']:.2%} of {record['sampled']} sampled tokens have "
        "log-probability and version\n"
        f"largest difference of log-probabilities {record['logprob_difference']:.1e} "
        f"(aim {TOLERANCE:g})\n"
        f"gateway / engine alone = {record['of_alone']:.3f} (aim {AIM}): "
        f"{rates['gateway']:.0f} and {rates['alone']:.0f} tokens/s"
    )


def misses(record: Record) -> list[str]:
    """Return the aims that were missed."""
    missed = {
        "tokens were tokenised again": record["retokenised"] > 0,
        "sampled tokens lack a log-probability or a version": record["stamped"] < record["sampled"],
        f"log-probabilities differ by more than {TOLERANCE:g}": record["logprob_difference"]
        > TOLERANCE,
        f"less than {AIM} of the tokens/s of the engine alone": record["of_alone"] < AIM,
    }
    return [text for text, holds in missed.items() if holds]


STUDY = Study(name="agents", options=AgentsOptions, measure=measure, table=table, misses=misses)
