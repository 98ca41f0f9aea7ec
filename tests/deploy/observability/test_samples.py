"""Rollouts as text: what is decoded, chosen, shortened and escaped."""

from dataclasses import replace

from deploy.observability.samples import (
    LONGEST,
    best_and_worst,
    decode_samples,
    heading,
    text_of,
)
from queues.records import RolloutGroup, Segment
from queues.schema import encode
from tests.queues.conftest import make_rollout


class Spelling:
    """A tokenizer that names ids."""

    def decode(self, ids, **_):
        return " ".join(f"t{number}" for number in ids)


def decoded(*rollouts):
    group = RolloutGroup(group_id="g", prompt_id="sums/0/1", attempt=1, rollouts=rollouts)
    return [*decode_samples([encode(group)], 7, Spelling())]


def test_prompt_and_response_are_apart_and_the_oldest_token_sets_the_lag():
    rollout = make_rollout(0, [5, 6], reward=0.5)
    [sample] = decoded(rollout)
    ids, end = list(rollout.token_ids), rollout.prompt_length
    assert sample.prompt.split() == [f"t{number}" for number in ids[:end]]
    assert sample.response.split() == [f"t{number}" for number in ids[end:]]
    assert (sample.version, sample.lag, sample.tokens, sample.reward) == (7, 2, 2, 0.5)
    assert heading(sample).startswith("version 7 · g/0 · sums/0/1 · reward 0.5")


def test_a_further_segment_is_told_from_what_it_follows():
    [sample] = decoded(make_rollout(0, [5, 5, 6], segments=(Segment(4, 0, 2),)))
    assert sample.response == "t3\n── segment 1, after 2 tokens of 0 ──▶\nt4 t5"


def test_the_best_and_the_worst_are_kept_without_the_middle_of_long_texts():
    found = decoded(*(make_rollout(n, [5, 6], reward=float(n % 3)) for n in range(4)))
    assert [sample.reward for sample in best_and_worst(found)] == [2.0, 0.0]
    assert best_and_worst(found[:1]) == found[:1]
    assert best_and_worst([]) == []
    [long] = best_and_worst([replace(found[0], response="a" * 9 + "b" * LONGEST)])
    assert long.response.startswith("a" * 9)
    assert "[…9 characters…]" in long.response
    assert len(long.response) < LONGEST + 40


def test_what_acts_on_a_terminal_is_escaped_everywhere():
    sample = replace(decoded(make_rollout(0, [5]))[0], prompt_id="x\x1b\ny", response="\x07")
    assert "x\\x1b\\ny" in heading(sample)
    assert text_of(sample).endswith("\\x07")
