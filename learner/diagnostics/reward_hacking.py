"""Finds reward hacking: the gold reward of the same rollouts does not follow the reward.

Optimised far enough, a proxy rises while the gold reward falls behind and then falls (Gao, Schulman
and Hilton 2022, "Scaling Laws for Reward Model Overoptimization", arXiv 2210.10760). A run is
hacking if the newest half or quarter of its last 16, 32, 64 or 128 batches differs from the others
of these in that

- evidence that the gap g = reward − gold reward has risen reaches `EVIDENCE`,
- the mean reward is not lower, but for a standard error of the gap's rise,
- and the mean gold reward is higher by less than a quarter of what the reward gained, less such an
  error: where the reward is at its largest value already, the gold reward falls.

Evidence is a product of bets on the gap of each group of that newest part, against the gaps of all
groups up to it and its own: 1 + λ (g − mean) / (mean − smallest), averaged over three λ. As long as
the gap keeps its distribution, whatever that is, every order of the groups is as probable, and each
bet has the expectation 1. So chance reaches n with a probability of at most 1 / n (Markov); rewards
and prompts that both share cancel in the gap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learner.diagnostics.batch_report import TrainedBatch

EVIDENCE = 10_000.0
BETS = np.array([[0.1], [0.3], [0.9]])
"""Values of λ."""
WINDOWS = (128, 64, 32, 16)
"""Numbers of batches with gold rewards that are looked back on."""
PARTS = (2, 4)
"""Parts of a window of which the newest one may be hacked."""
KEPT = 0.25
"""Share of the reward's gain from which the gold reward counts as keeping up."""
FEWEST = 8
"""Groups of a window before anything is said about it."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hacking:
    """A finding: since version `since`, the gold reward does not follow the reward."""

    version: int
    since: int
    reward: float
    """Rise of the mean reward since then, over the batches before that were looked back on."""
    gold: float
    """Rise of the mean gold reward."""
    changes: Mapping[str, tuple[float, float]]
    """Figures of the groups at both versions, by name."""

    def __str__(self) -> str:
        """Say what was found, in a sentence."""
        changes = (f"{name} {then:.3g} → {now:.3g}" for name, (then, now) in self.changes.items())
        return (
            f"version {self.version}: the reward is hacked. Since version {self.since} it rose by "
            f"{self.reward:.3f} on prompts with a gold reward, and the gold reward by "
            f"{self.gold:.3f}: {', '.join(changes)}"
        )


def find_hacking(batches: Sequence[TrainedBatch]) -> Hacking | None:
    """Return what the newest batch shows, with those before it that are looked back on."""
    watched = [(it.version, it.report.gold) for it in batches if it.report.gold is not None]
    if not watched or watched[-1][0] != batches[-1].version:
        return None
    version, now = watched[-1]
    for window in WINDOWS:
        recent = watched[-window:]
        pairs = np.array([pair for _, figures in recent for pair in figures.groups])
        logs = _log_bets(pairs[:, 0] - pairs[:, 1])
        for part in PARTS:
            newest = recent[-max(1, len(recent) // part) :]
            since, then = newest[0]
            start = len(pairs) - sum(len(figures.groups) for _, figures in newest)
            if _is_hacked(pairs, logs, start):
                reward, gold = pairs[start:].mean(0) - pairs[:start].mean(0)
                changes = {name: (then.means[name], mean) for name, mean in now.means.items()}
                return Hacking(version, since, float(reward), float(gold), changes)
    return None


def _is_hacked(pairs: Values, logs: Values, start: int) -> bool:
    """Return True if from a group on the gold reward does not keep up with the reward."""
    evidence = np.logaddexp.reduce(logs[:, start:].sum(1)) - math.log(len(BETS))
    if len(pairs) < FEWEST or start == 0 or evidence < math.log(EVIDENCE):
        return False
    reward, gold = pairs[start:].mean(0) - pairs[:start].mean(0)
    error = (pairs[:, 0] - pairs[:, 1]).std() * math.sqrt(1 / start + 1 / (len(pairs) - start))
    return bool(reward > -error and gold < KEPT * reward - error)


def _log_bets(gaps: Values) -> Values:
    """Return the logarithm of the bet on each gap, by λ [λ, groups]."""
    means = np.cumsum(gaps) / np.arange(1, len(gaps) + 1)
    spreads = means - np.minimum.accumulate(gaps)
    told = spreads > 1e-9 * np.maximum(1.0, abs(means))
    bets = np.divide(gaps - means, spreads, out=np.zeros_like(gaps), where=told)
    logs: Values = np.log1p(BETS * bets)
    return logs
