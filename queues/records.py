"""The records that travel between actors, queues and learner; `queues.schema` encodes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

Payload = bytes | memoryview
"""An encoded group; a view if it is in Ray's memory."""
SHAPING = frozenset({"overlong", "missing_eos"})
"""Reward parts that shape lengths and do not judge the task."""
GOLD = "headway:gold"
"""Reward part of the gold reward, which is in no `reward` and trains nothing."""
REWARD_MODEL_LOST = "reward_model_lost"
"""Reason of attempts that fail while the reward models are gone; they do not count."""
INFRASTRUCTURE = "infrastructure"
"""Reason of attempts that fail by another fault of the infrastructure; they do not count."""


class FinishReason(StrEnum):
    """The end of a rollout."""

    STOP = "stop"
    """The policy sampled an end-of-sequence token, or a stop of `actors.stop`."""
    LENGTH = "length"
    TIMEOUT = "timeout"
    """The environment took too long to answer the policy, which `actors.on_timeout` scores."""
    ABORTED = "aborted"
    ERROR = "error"


class Purpose(StrEnum):
    """The purpose that a group is generated for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    """Held-out: scored and reported, never trained, outside admission and the training accounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task instance, produced by a prompt source."""

    prompt_id: str
    """Stable: `source/epoch/index`, e.g. "chain_sum/0/17"."""
    text: str
    answer: str | None = None
    """Reference answer for the reward; None if the reward needs none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, passed to the reward unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right, until it expires, to generate one group; made by the broker."""

    group_id: str
    attempt: int
    """Fencing token, from 1: only the current attempt may be put."""
    prompt: Prompt
    group_size: int
    """Rollouts to put."""
    purpose: Purpose
    temperature: float | None
    """Sampling temperature; None for that of the actor's configuration."""
    start_version: int
    """s: the version that the engine served when the lease was granted, or the oldest version of
    the saved tokens, if that is older."""
    deadline_version: int | None
    """The last version whose batch may train the group: s + η, or earlier with a controller; None
    for evaluations."""
    greedy_baseline: bool = False
    """Sample one more rollout, greedily, which is scored as a baseline and not put."""
    saved: bytes | None = None
    """Saved tokens of earlier attempts, to be continued (`WorkQueue.save`)."""
    notes: Mapping[tuple[int, str], bytes] = field(default_factory=dict)
    """Notes of earlier attempts by sample index and name (`WorkQueue.note`)."""

    @property
    def capacity(self) -> int:
        """Rollouts that are generated at once, the greedy baseline included."""
        return rollouts_at_once(self.group_size, self.greedy_baseline)


def rollouts_at_once(group_size: int, greedy_baseline: bool) -> int:
    """Return how many rollouts of a group are generated at once, its greedy baseline included."""
    return group_size + (1 if greedy_baseline else 0)


class TurnReward(NamedTuple):
    """The reward that an environment gave for one turn, or a process reward model for one step."""

    end: int
    """Index in `Rollout.token_ids` of the last token of the turn or step."""
    reward: float


class Segment(NamedTuple):
    """Tokens of a rollout that follow another history than those before them in its row.

    They are `Rollout.token_ids[start:]` up to the next segment, and follow the first `prefix`
    tokens of the path of segment `parent`: its own tokens after those that they follow themselves.
    """

    start: int
    parent: int
    prefix: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the policy in a rollout of several, as it was saved when it was complete."""

    number: int
    """From 0 within its rollout."""
    parent: int
    """Turn whose path, its prompt and its answer, the prompt begins with; −1 for none."""
    shared: int
    """Tokens of that path that the prompt begins with."""
    injected: Sequence[int]
    """The rest of the prompt."""
    token_ids: Sequence[int]
    """Sampled, as the next two lists."""
    behavior_logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    cache_salt: str
    """Salt of the request (`RolloutEngine.generate`)."""


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
    turn_rewards: Sequence[TurnReward] = ()
    """Parts of the reward that were given for turns or steps; a turn without one is not listed."""
    baseline_reward: float | None = None
    """Reward of the group's greedy rollout; None without one."""
    segments: Sequence[Segment] = ()
    """Segments after the first, which begins with the prompt, in the order of their starts. Each
    has the rollout's reward; a token trains in the segment that it belongs to, and is context in
    those that follow it."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that are in no segment, by reason."""

    @property
    def task_reward(self) -> float:
        """The reward less its shaping, which judges the task alone."""
        return self.reward - sum(self.reward_parts.get(name, 0.0) for name in SHAPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one issue of a prompt; leased, queued, journaled and acknowledged as one."""

    group_id: str
    prompt_id: str
    attempt: int
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The properties of a group's result that the broker needs; see `queues.schema.summarize`."""

    group_id: str
    prompt_id: str
    attempt: int
    rollouts: int
    tokens: int
    """Sampled tokens."""
    reward: float
    """Mean over the rollouts."""
    task_rewards: Sequence[float]
    """`Rollout.task_reward` of each rollout."""
    oldest_version: int | None
    """Oldest version of the sampled tokens; None if nothing was sampled."""
    newest_version: int | None


class PutStatus(StrEnum):
    """The broker's answer to a put."""

    ACCEPTED = "accepted"
    """Durable."""
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
    """One batch that was trained at `version`; made at its acknowledgement."""

    version: int
    acked_at: float
    """Epoch seconds."""
    statistics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of a finished evaluation, which `deploy.driver.evaluations` reads."""

    count: int
    """Rollouts, failed rollouts included."""
    failed: int
    score: float | None
    """Mean reward of the rollouts that did not fail; None if all did."""
    best: float | None
    """Mean over the complete prompts of their largest reward: pass@k if each was given k times."""
    incomplete: int
    """Prompts of which a rollout failed: `best` leaves them out."""
    lowest_version: int | None
    """Lowest version of all sampled tokens; None without tokens."""
    highest_version: int | None
