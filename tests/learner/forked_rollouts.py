"""Random rollouts whose histories fork, and each of their paths as a rollout of its own."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from rollouts import VOCABULARY, group, rollout

from queues.records import Segment, TurnReward
from queues.segments import paths, spans


@st.composite
def trees(draw, index):
    """Draw a rollout of one to four segments, with log-probabilities that float32 holds."""
    prompt = draw(st.integers(1, 3))
    mask = [False] * prompt + draw(st.lists(st.booleans(), min_size=1, max_size=6))
    segments, lengths = [], [len(mask)]
    for _ in range(draw(st.integers(0, 3))):
        parent = draw(st.integers(0, len(segments)))
        prefix = draw(st.integers(0, lengths[parent]))
        own = [False] * (not prefix) + draw(st.lists(st.booleans(), min_size=1, max_size=6))
        segments.append(Segment(len(mask), parent, prefix))
        lengths.append(prefix + len(own))
        mask = mask + own
    count = sum(mask)
    one = rollout(
        [draw(st.integers(0, VOCABULARY - 1)) for _ in mask],
        prompt=prompt,
        mask=mask,
        reward=float(draw(st.integers(0, 3)) + 4 * index),
        versions=[draw(st.integers(3, 5)) for _ in range(count)],
        logprobs=[-draw(st.integers(1, 48)) / 16 for _ in range(count)],
        index=index,
    )
    sampled = [at for at, trains in enumerate(mask) if trains]
    ends = draw(st.sets(st.sampled_from(sampled), max_size=2)) if sampled else ()
    turns = tuple(TurnReward(end, draw(st.sampled_from([-0.5, 0.0, 0.25]))) for end in sorted(ends))
    return replace(one, segments=tuple(segments), turn_rewards=turns)


@st.composite
def forked_groups(draw):
    """Draw one or two groups of rollouts, of which a token trains."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=1, max_size=2))
    drawn = [
        group(f"g{number}", [draw(trees(index)) for index in range(size)])
        for number, size in enumerate(sizes)
    ]
    if not any(any(one.loss_mask) for one in drawn[0].rollouts):
        drawn[0].rollouts[0] = rollout([1, 2, 3], reward=1.0, versions=4)
    return drawn


def alone(one):
    """Return the paths of a rollout as rollouts, whose prompts are what a path has in common.

    The reward of each is that of the rollout, but for the turns that other paths own.
    """
    final = one.reward - sum(turn.reward for turn in one.turn_rewards)
    found = []
    for path, (start, end) in zip(paths(one), spans(one.segments, len(one.token_ids)), strict=True):
        context = len(path) - (end - start)
        turns = tuple(
            TurnReward(turn.end - start + context, turn.reward)
            for turn in one.turn_rewards
            if start <= turn.end < end
        )
        columns = {
            name: [empty] * context + list(getattr(one, name)[start:end])
            for name, empty in (("loss_mask", False), ("behavior_logprobs", 0.0), ("versions", -1))
        }
        found.append(
            replace(
                one,
                token_ids=np.array(one.token_ids)[path].tolist(),
                prompt_length=max(1, context),
                reward=final + sum(turn.reward for turn in turns),
                turn_rewards=turns,
                segments=(),
                **columns,
            )
        )
    return found
