"""Rollouts of trained batches as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.clean_text import printable, without_secrets
from queues.records import Payload, Rollout
from queues.schema import decode
from queues.segments import spans

FILE = "samples.jsonl"
"""File of a run with a few samples of each batch, which outlive rollouts that are not kept."""
LONGEST = 4000
"""Characters that are kept of a prompt and of a response in that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trained rollout as text."""

    version: int
    """The version that its batch was trained at."""
    group_id: str
    prompt_id: str
    sample_index: int
    reward: float
    reward_parts: Mapping[str, float]
    tokens: int
    """Sampled tokens."""
    lag: int
    """Versions between the oldest of these tokens and the training."""
    finish_reason: str
    prompt: str
    """With the tokens of its chat template."""
    response: str
    """Everything after the prompt, with what an environment inserted, segment by segment."""


def decode_samples(payloads: Sequence[Payload], version: int, tokenizer: Any) -> Iterator[Sample]:
    """Yield every rollout of the groups of a batch, decoded by the tokenizer of its policy."""
    for payload in payloads:
        group = decode(payload)
        for rollout in group.rollouts:
            versions = zip(rollout.versions, rollout.loss_mask, strict=True)
            sampled = [sampled_by for sampled_by, trains in versions if trains]
            yield Sample(
                version=version,
                group_id=group.group_id,
                prompt_id=group.prompt_id,
                sample_index=rollout.sample_index,
                reward=rollout.reward,
                reward_parts=dict(rollout.reward_parts),
                tokens=len(sampled),
                lag=version - min(sampled, default=version),
                finish_reason=str(rollout.finish_reason),
                prompt=_text(rollout.token_ids[: rollout.prompt_length], tokenizer),
                response=_response(rollout, tokenizer),
            )


def _response(rollout: Rollout, tokenizer: Any) -> str:
    """Return the text after the prompt; each further segment is told from what it follows."""
    pieces = []
    for number, (start, end) in enumerate(spans(rollout.segments, len(rollout.token_ids))):
        if number:
            _, parent, prefix = rollout.segments[number - 1]
            pieces.append(f"\n── segment {number}, after {prefix} tokens of {parent} ──▶\n")
        pieces.append(_text(rollout.token_ids[max(start, rollout.prompt_length) : end], tokenizer))
    return "".join(pieces)


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return without_secrets(text)


def best_and_worst(samples: Sequence[Sample]) -> list[Sample]:
    """Return the sample of the highest and that of the lowest reward, shortened."""
    ordered = sorted(samples, key=lambda sample: sample.reward, reverse=True)
    return [
        replace(sample, prompt=_shortened(sample.prompt), response=_shortened(sample.response))
        for sample in [*ordered[:1], *ordered[1:][-1:]]
    ]


def _shortened(text: str) -> str:
    """Leave out the middle of a text that is longer than LONGEST."""
    left_out = len(text) - LONGEST
    if left_out <= 0:
        return text
    half = LONGEST // 2
    return f"{text[:half]} […{left_out} characters…] {text[-half:]}"


def heading(sample: Sample) -> str:
    """Describe a sample in one line, without its text; control characters are escaped."""
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.reward_parts.items())
    reward = f"reward {sample.reward:g}" + (f" ({parts})" if len(sample.reward_parts) > 1 else "")
    line = (
        f"version {sample.version} · {sample.group_id}/{sample.sample_index} · {sample.prompt_id} "
        f"· {reward} · {sample.tokens} tokens · {sample.finish_reason} · lag {sample.lag}"
    )
    return printable(line).replace("\n", "\\n")


def text_of(sample: Sample) -> str:
    """Return prompt and response of a sample, with control characters escaped."""
    return printable(f"{sample.prompt}\n──▶\n{sample.response}")
