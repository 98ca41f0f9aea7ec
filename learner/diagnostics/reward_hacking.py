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

It is hacking as well, before its gold reward falls, if of the rollouts of a group those with more
reward have less gold reward: a step towards the reward changes the mean of the gold reward by the
covariance of the two (Price 1970, "Selection and Covariance", Nature 227). The evidence bets on
each group's correlation r by 1 − λ r, from the first group of those windows on.
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
    agreement: float | None
    """Mean correlation of both rewards within the groups looked back on; None without any."""
    changes: Mapping[str, tuple[float, float]]
    """Figures of the groups at both versions, by name."""

    def __str__(self) -> str:
        """Say what was found, in a sentence."""
        changes = (f"{name} {then:.3g} → {now:.3g}" for name, (then, now) in self.changes.items())
        agreement = "unknown" if self.agreement is None else f"{self.agreement:.2f}"
        return (
            f"version {self.version}: the reward is hacked. Since version {self.since} it rose by "
            f"{self.reward:.3f} on prompts with a gold reward, and the gold reward by "
            f"{self.gold:.3f}; their correlation within groups is {agreement}: {', '.join(changes)}"
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
        gaps = _log_bets(pairs[:, 0] - pairs[:, 1])
        agreement = np.array([r for _, figures in recent for r in figures.agreement])
        is_opposed = _evidence(np.log1p(-BETS * agreement)) >= math.log(EVIDENCE)
        for part in PARTS:
            newest = recent[-max(1, len(recent) // part) :]
            since, then = newest[0]
            start = len(pairs) - sum(len(figures.groups) for _, figures in newest)
            if start and (is_opposed or _is_behind(pairs, gaps, start)):
                reward, gold = pairs[start:].mean(0) - pairs[:start].mean(0)
                agree = float(agreement.mean()) if len(agreement) else None
                changes = {name: (then.means[name], mean) for name, mean in now.means.items()}
                return Hacking(version, since, float(reward), float(gold), agree, changes)
    return None


def _evidence(bets: Values) -> float:
    """Return the logarithm of the mean over λ of the products of bets [λ, groups]."""
    return float(np.logaddexp.reduce(bets.sum(1)) - math.log(len(BETS)))


def _is_behind(pairs: Values, gaps: Values, start: int) -> bool:
    """Return True if from a group on the gold reward does not keep up with the reward."""
    if len(pairs) < FEWEST or _evidence(gaps[:, start:]) < math.log(EVIDENCE):
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
