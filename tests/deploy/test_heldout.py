"""Which evaluations a run makes."""

from actors.config import HeldoutConfig
from deploy.heldout import by_version, plan


def test_both_ends_are_larger_and_every_version_is_scored_both_ways():
    config = HeldoutConfig(size=50, every=10, final_size=200, sampled=True)
    planned = plan(config, steps=25, temperature=0.8)
    assert [(p.version, p.kind, p.temperature, p.size) for p in planned] == [
        (0, "greedy", 0.0, 200),
        (0, "sampled", 0.8, 200),
        (10, "greedy", 0.0, 50),
        (10, "sampled", 0.8, 50),
        (20, "greedy", 0.0, 50),
        (20, "sampled", 0.8, 50),
        (25, "greedy", 0.0, 200),
        (25, "sampled", 0.8, 200),
    ]
    assert [version for version, _ in by_version(planned)] == [0, 10, 20, 25]
    assert len({p.name for p in planned}) == len(planned)


def test_without_sampled_only_greedy_is_scored_and_the_last_version_once():
    config = HeldoutConfig(size=50, every=10, sampled=False)
    assert [(p.version, p.kind, p.size) for p in plan(config, steps=10, temperature=1.0)] == [
        (0, "greedy", 50),
        (10, "greedy", 50),
    ]
