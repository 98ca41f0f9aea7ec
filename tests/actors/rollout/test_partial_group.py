"""The kept rollouts of a group that is not finished, and how often they are worth writing."""

from dataclasses import replace

from fakes import lease, rollout

from actors.rollout.partial_group import PartialGroup
from queues.records import FinishReason


def test_a_draft_is_due_when_half_of_its_tokens_are_new_and_has_changed_when_any_is():
    draft = PartialGroup(lease(size=4))
    seen = []
    for index in range(4):  # of 2 tokens each
        draft.keep(rollout(lease(), index))
        seen.append((draft.changed, draft.due))
        if draft.due:
            draft.encode()
    assert seen == [(True, True), (True, True), (True, False), (True, True)]
    assert not draft.changed


def test_a_rollout_of_which_nothing_was_sampled_is_not_kept():
    draft = PartialGroup(lease())
    nothing = replace(
        rollout(lease(), 0), token_ids=[5], loss_mask=[False], behavior_logprobs=[0.0],
        versions=[-1], finish_reason=FinishReason.ABORTED,
    )  # fmt: skip
    draft.keep(nothing)
    assert draft.get(0) is None
    assert not draft.changed
