"""Best against worst: preference pairs of a group, for online DPO (OAIF, arXiv 2402.04792)."""

from dataclasses import replace

from learner.advantages.best_of_n import ranks
from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import Estimate, built_in_advantage


@built_in_advantage("best_worst")
def best_worst(batch: GroupedRewards) -> Estimate:
    """A_i = +1 for the best rollout of a group, −1 for the worst; the others do not train.

    The loss `dpo` takes the preferred side from the sign. Among equal rewards the first in the
    batch is taken. A group without variance has no pair, and is left out.
    """
    best = (ranks(batch) == 0) & ~batch.tied
    worst = (ranks(replace(batch, rewards=-batch.rewards)) == 0) & ~batch.tied
    return Estimate(best.double() - worst.double(), keep=best | worst)
