"""The watch for reward hacking, on simulated runs whose true rewards are known."""

import json
import math
import random
from dataclasses import asdict
from statistics import correlation, fmean
from types import SimpleNamespace

import pytest

from learner.diagnostics.batch_report import BatchReport, GoldFigures
from learner.diagnostics.reward_hacking import Hacking, find_hacking

SIZE = 8
"""Rollouts of a group."""


def figures(groups, agreement=()):
    return GoldFigures(groups=groups, agreement=agreement, length=20.0, finished=0.9, distinct=0.5)


def batch(version, groups, agreement=()):
    gold = None if groups is None else figures(groups, agreement)
    return SimpleNamespace(version=version, report=SimpleNamespace(gold=gold))


def logistic(middle, width):
    return lambda version: 1 / (1 + math.exp((middle - version) / width))


def rising(version):
    return 0.2 + 0.6 * (1 - math.exp(-version / 20))


def falling(version):
    return 1 - rising(version)


def group_of(rewards, golds):
    """Return the means of a group's rewards, and their correlation where both differ."""
    differ = len({*rewards}) > 1 and len({*golds}) > 1
    return (fmean(rewards), fmean(golds)), [correlation(rewards, golds)] if differ else []


def simulate(seed, skill, hacks=lambda version: 0.0, *, groups=16, noise=0.0, versions=80):
    """Return the first finding, or None, and how far the true gold reward is below its best then.

    A rollout hacks with the chance `hacks`: its reward is 1 and its gold reward 0. Else both say
    whether it is right, with the chance `skill` of the policy and by the difficulty of its prompt;
    the gold reward errs with the chance `noise`.
    """
    chance, batches, best = random.Random(seed), [], 0.0
    for version in range(versions):
        gold_now = (1 - hacks(version)) * skill(version)
        best, pairs, agreement = max(best, gold_now), [], []
        for _ in range(groups):
            ability = min(0.98, max(0.02, skill(version) + chance.gauss(0, 0.25)))
            rewards, golds = [], []
            for _ in range(SIZE):
                hacked, right = chance.random() < hacks(version), chance.random() < ability
                rewards.append(hacked or right)
                golds.append(not hacked and (right != (chance.random() < noise)))
            means, correlated = group_of(rewards, golds)
            pairs.append(means)
            agreement += correlated
        batches.append(batch(version, pairs, agreement))
        if (finding := find_hacking(batches)) is not None:
            return finding, best - gold_now
    return None, 0.0


@pytest.mark.parametrize(
    ("skill", "hacks"),
    [
        (lambda version: 0.5, logistic(40, 4)),
        (rising, logistic(40, 4)),
        (lambda version: 0.3, logistic(40, 3)),
        (lambda version: 0.5, logistic(60, 5)),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_hacking_is_found_before_the_gold_reward_falls_by_five_points(seed, skill, hacks):
    finding, fall = simulate(seed, skill, hacks)
    assert finding is not None
    assert fall < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_against_the_gold_reward_is_found_before_the_policy_has_moved(seed):
    """It pays for a style that is less often right, which six of ten rollouts have at first."""
    chance, batches = random.Random(seed), []
    for version in range(20):
        pairs, agreement, in_style = [], [], 0.6 + 0.01 * version
        for _ in range(16):
            styles = [chance.random() < in_style for _ in range(SIZE)]
            rights = [chance.random() < (0.3 if style else 0.7) for style in styles]
            means, correlated = group_of(styles, rights)
            pairs.append(means)
            agreement += correlated
        batches.append(batch(version, pairs, agreement))
        if (finding := find_hacking(batches)) is not None:
            break
    assert finding is not None
    assert (0.7 - 0.3) * 0.01 * version < 0.05
    assert finding.agreement < -0.2


@pytest.mark.parametrize("skill", [rising, falling, lambda version: 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("groups", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_an_honest_reward_is_never_called_hacked(skill, noise, groups):
    found = [simulate(seed, skill, noise=noise, groups=groups)[0] for seed in range(10)]
    assert found == [None] * 10


def pairs_of(reward, gold, *, groups=8):
    return [(reward + 0.02 * (index % 3), gold + 0.02 * (index % 3)) for index in range(groups)]


@pytest.mark.parametrize(
    ("reward", "gold", "found"),
    [
        (lambda v: 0.2 + 0.01 * v, lambda v: 0.2, True),
        (lambda v: 0.2 + 0.01 * v, lambda v: 0.5 - 0.005 * v, True),
        (lambda v: 2 + 0.1 * v, lambda v: 0.2, True),
        (lambda v: 0.97 - 2e-4 * v, lambda v: 0.9 - 0.01 * v, True),
        (lambda v: 0.2 + 0.01 * v, lambda v: 0.2 + 0.01 * v, False),
        (lambda v: 0.2 + 0.01 * v, lambda v: 0.2 + 0.006 * v, False),
        (lambda v: 0.9 - 0.005 * v, lambda v: 0.9 - 0.01 * v, False),
        (lambda v: 0.5, lambda v: 0.5, False),
        (lambda v: 0.1 * 3, lambda v: 0.3, False),
        (lambda v: -5.0, lambda v: 1e6, False),
    ],
)
def test_only_a_reward_that_leaves_the_gold_reward_behind_is_called_hacked(reward, gold, found):
    batches = [batch(version, pairs_of(reward(version), gold(version))) for version in range(60)]
    findings = [find_hacking(batches[:end]) for end in range(1, 61)]
    assert any(findings) is found


def test_a_finding_says_since_when_and_what_changed():
    def hacked(version):
        share = max(0, version - 20) / 40
        return pairs_of(0.5 + 0.5 * share, 0.5 - 0.3 * share)

    batches = [batch(version, hacked(version)) for version in range(60)]
    found = next(filter(None, (find_hacking(batches[:end]) for end in range(1, 60))))
    assert 20 < found.version < 40
    assert (10 < found.since <= found.version, found.reward > 0 > found.gold) == (True, True)
    assert f"the reward is hacked. Since version {found.since} it rose by" in str(found)
    assert "length 20 → 20, finished 0.9 → 0.9" in str(found)
    assert str(Hacking(**json.loads(json.dumps(asdict(found))))) == str(found)
    assert find_hacking([*batches, batch(60, None)]) is None, "the newest batch says nothing"
    assert find_hacking([]) is None


def test_figures_come_back_from_the_record_of_a_batch():
    report = BatchReport.from_dict({"gold": dict(vars(figures([[0.5, 0.25], [1.0, 0.0]])))})
    assert report.gold.means == {
        "reward": 0.75, "gold": 0.125, "length": 20.0, "finished": 0.9, "distinct": 0.5,
    }  # fmt: skip
    assert BatchReport.from_dict(report.to_dict()) == report
    assert "gold" not in BatchReport.from_dict({}).to_dict()
