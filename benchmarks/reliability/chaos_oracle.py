"""The oracle of `headway bench chaos`: prompts that a run lost, and groups that it trained twice.

Compares the source, read anew, with the learner's own log. The ledger is consulted only for groups
that were not trained, and for filtered ones their rewards are compared in the journal.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

WAITING = frozenset({"queued", "leased", "ready"})
"""States of groups that more steps would have trained."""


class Fate(NamedTuple):
    """The ledger's row of one group that was issued for training."""

    prompt_id: str
    state: str
    reason: str
    tied: bool | None
    """True if all its rewards in the journal are the same; None without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one run."""

    steps: int
    issued: int
    """Prompts of the source up to the last one in log or ledger."""
    trained: int
    """Prompts in the learner's log."""
    left_out: dict[str, int]
    """Prompts that were rightly not trained, by reason."""
    dropped_overdue: int
    """Groups that were dropped as stragglers; their prompts were issued again."""
    retrained_batches: int
    """Lines of the log beyond one a batch: trained again after a rollback."""
    max_lag: int | None
    problems: list[str]
    prompts_lost: int
    groups_trained_twice: int
    lags_above_bound: int

    @property
    def sound(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**asdict(self), "sound": self.sound}


def judge(
    log: Sequence[Mapping[str, Any]],
    source: Sequence[str],
    fates: Sequence[Fate],
    *,
    steps: int,
    groups_per_batch: int,
    max_staleness: int,
) -> Verdict:
    """Compare a finished run with the learner's log and the source."""
    problems: list[str] = []
    newest: dict[int, int] = {}  # by process
    batches: dict[int, list[tuple[str, str, int | None]]] = {}
    for row in log:
        groups = [(prompt, group, oldest) for prompt, group, oldest in row["groups"]]
        if batches.setdefault(row["version"], groups) != groups:
            problems.append(f"batch {row['version']} was trained again with other groups")
        before = newest.get(row["pid"], row["version"] - 1)
        if row["version"] != before + 1:
            problems.append(f"one process trained batch {row['version']} after batch {before}")
        newest[row["pid"]] = row["version"]
    if sorted(batches) != list(range(steps)):
        missing = sorted(set(range(steps)) ^ set(batches))
        problems.append(f"the log does not hold the batches 0 to {steps - 1} once: {missing[:5]}")
    short = [version for version, groups in batches.items() if len(groups) != groups_per_batch]
    problems += [f"batch {version} has {len(batches[version])} groups" for version in short]
    trained = [(prompt, group) for groups in batches.values() for prompt, group, _ in groups]
    twice = _repeated(group for _, group in trained) + _repeated(prompt for prompt, _ in trained)
    problems += [f"{name} was trained in two batches" for name in twice[:5]]
    lags = [
        (version - oldest, group)
        for version, groups in batches.items()
        for _, group, oldest in groups
        if oldest is not None
    ]
    above = [(lag, group) for lag, group in lags if lag > max_staleness]
    problems += [f"{group} was trained with a lag of {lag}" for lag, group in above[:5]]
    left_out, issued, lost = _account(source, {prompt for prompt, _ in trained}, fates)
    ends = {fate.prompt_id for fate in fates if fate.state == "trained"}
    unknown = [prompt for prompt, _ in trained if prompt not in ends]
    problems += [f"prompt {prompt} is trained, but not in the ledger" for prompt in unknown[:5]]
    problems += [f"prompt {prompt} is lost: {what}" for prompt, what in lost[:5]]
    return Verdict(
        steps=steps,
        issued=issued,
        trained=len(trained),
        left_out=left_out,
        dropped_overdue=sum(fate.reason == "overdue" for fate in fates),
        retrained_batches=len(log) - len(batches),
        max_lag=max((lag for lag, _ in lags), default=None),
        problems=problems,
        prompts_lost=len(lost),
        groups_trained_twice=len(twice),
        lags_above_bound=len(above),
    )


def _account(
    source: Sequence[str], trained: set[str], fates: Sequence[Fate]
) -> tuple[dict[str, int], int, list[tuple[str, str]]]:
    """Return the prompts rightly left out by reason, how many were issued, and the lost ones."""
    of_prompt: dict[str, list[Fate]] = {}
    for fate in fates:
        of_prompt.setdefault(fate.prompt_id, []).append(fate)
    order = {prompt: index for index, prompt in enumerate(source)}
    known = trained | of_prompt.keys()
    issued = 1 + max((order[prompt] for prompt in known if prompt in order), default=-1)
    lost = [(prompt, "the source does not have it") for prompt in sorted(known - order.keys())]
    left_out: Counter[str] = Counter()
    for prompt in source[:issued]:
        if prompt in trained:
            continue
        # A prompt that was dropped is issued again: the newest of its groups counts.
        newest = of_prompt[prompt][-1] if prompt in of_prompt else None
        if newest is None:
            lost.append((prompt, "the ledger does not have it"))
        elif newest.state in WAITING:
            left_out["waiting"] += 1
        elif newest.state == "dropped" and newest.reason == "filtered" and newest.tied:
            left_out["filtered"] += 1
        else:  # failed groups too: nothing in this task fails by itself
            lost.append((prompt, f"the ledger says {newest.state} {newest.reason}".strip()))
    return dict(left_out), issued, lost


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
