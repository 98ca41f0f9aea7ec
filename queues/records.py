"""What travels between actors, queues and learner: prompts, leases, rollouts, groups.

Plain values without behaviour beyond their own consistency. How they look on the wire is
`queues.schema`; who may hold which one when is `queues.policy.admission` and
`queues.storage.ledger`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

Payload = bytes | memoryview
"""An encoded group; a view where it lies in memory of Ray's."""
SHAPING = frozenset({"overlong", "missing_eos"})
"""Reward parts that shape lengths rather than judge the task."""
BASELINE_REWARD = "baseline_reward"
"""Key of `Rollout.metadata`: what the greedy rollout of the same prompt earned."""

REWARD_MODEL_LOST = "reward_model_lost"
"""Why attempts of groups fail while the reward models are gone; not held against them."""


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """The policy sampled an end-of-sequence token."""
    LENGTH = "length"
    """The token budget was used up."""
    ABORTED = "aborted"
    ERROR = "error"


class Purpose(StrEnum):
    """What a group is generated for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    """Held-out: scored and reported, never trained, outside admission and the training accounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task instance, produced by a prompt source.

    Example:
        >>> Prompt(prompt_id="chain_sum/0/17", text="a3+b4=", answer="7").prompt_id
        'chain_sum/0/17'
    """

    prompt_id: str
    """Stable: `source/epoch/index`."""
    text: str
    answer: str | None = None
    """What a reward compares with; None where the reward needs no reference."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable; handed to the reward as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right, until it expires, to generate one group; made by the broker."""

    group_id: str
    attempt: int
    """Fencing token, from 1: only the current attempt may be put."""
    prompt: Prompt
    group_size: int
    """Rollouts that are put."""
    purpose: Purpose
    temperature: float | None
    """None: the temperature of the actor's configuration."""
    start_version: int
    """The version that the engine served when the lease was granted, or the oldest of the saved
    tokens, where that is older (s)."""
    deadline_version: int | None
    """The last version whose batch may train the group: s + η, or earlier where a controller says
    so; None for evaluations. Whether it is trained later all the same says `queues.on_overdue`."""
    greedy_baseline: bool = False
    """Whether one more rollout is sampled, greedily: it is scored as a baseline and not put."""
    saved: bytes | None = None
    """What earlier attempts have sampled and saved (`partial_groups`), to be gone on with."""

    @property
    def room(self) -> int:
        """Rollouts that are generated at once."""
        return self.group_size + self.greedy_baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled trajectory. All per-token lists have the length of `token_ids`."""

    sample_index: int
    token_ids: Sequence[int]
    """The prompt and everything after it, as sampled or injected; never re-tokenised."""
    prompt_length: int
    loss_mask: Sequence[bool]
    """True exactly on the tokens that the policy sampled."""
    behavior_logprobs: Sequence[float]
    """Natural log-probability under the behaviour policy; 0 where not sampled."""
    versions: Sequence[int]
    """Policy version that sampled the token; −1 where not sampled."""
    reward: float
    reward_parts: Mapping[str, float]
    finish_reason: FinishReason
    turns: int
    environment: str
    engine_id: str
    created_at: datetime
    """Timezone-aware, UTC."""
    finished_at: datetime
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task_reward(self) -> float:
        """The reward less its shaping: what tells right from wrong."""
        return self.reward - sum(self.reward_parts.get(name, 0.0) for name in SHAPING)

    @property
    def baseline_reward(self) -> float | None:
        """What the greedy rollout of the group earned; None where none was asked for."""
        found = self.metadata.get(BASELINE_REWARD)
        return None if found is None else float(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one issue of a prompt; leased, queued, journaled and acknowledged as one."""

    group_id: str
    prompt_id: str
    attempt: int
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the broker keeps in mind of a group's result; made by `queues.schema.summarize`."""

    group_id: str
    prompt_id: str
    attempt: int
    rollouts: int
    tokens: int
    """Sampled tokens."""
    reward: float
    """Mean over the rollouts."""
    task_rewards: Sequence[float]
    """Of each rollout: its reward less the parts that are `SHAPING`."""
    oldest_version: int | None
    """Of the sampled tokens; None where nothing was sampled."""
    newest_version: int | None


class PutStatus(StrEnum):
    """The broker's answer to a put."""

    ACCEPTED = "accepted"
    """Durable: it survives the death of every process."""
    DUPLICATE = "duplicate"
    """The group already has its one accepted result; this one is ignored."""
    FENCED = "fenced"
    """The lease is not, or no longer, the caller's; the result is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups that are trained at one version; made by the broker, consumed by the learner."""

    version: int
    payloads: Sequence[Payload]
    """One per group, earliest deadline first; `queues.schema.decode` reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One trained batch; made at its acknowledgement, for whoever watches the run."""

    version: int
    """That it was trained at."""
    acked_at: float
    """Epoch seconds."""
    statistics: Mapping[str, Any]
    """As the learner acknowledged it, and what the broker adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of a finished evaluation; made by the broker, consumed by the feeder."""

    name: str
    count: int
    """Rollouts, failed ones included; a prompt has as many as it was given."""
    failed: int
    score: float | None
    """Mean reward of the rollouts that did not fail; None where all did."""
    best: float | None
    """Mean over the complete prompts of their largest reward: pass@k where each was given k times.
    None where there are none."""
    incomplete: int
    """Prompts of which a rollout failed: `best` leaves them out."""
    lowest_version: int | None
    """Of all sampled tokens; None where there are none."""
    highest_version: int | None
    tokens: int
    """Sampled tokens."""
    seconds: float
    """From the first lease to the last result; 0 where nothing was leased."""
