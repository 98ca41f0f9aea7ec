"""Counters of one actor's sessions of agents, which warn where much of what is sampled is lost."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway import clock

NEWEST, LEAST = 1000, 100
"""Turns that are judged, and turns from which on they are."""
SHARE = 0.1
"""Largest share of sampled tokens left out, and of turns that begin a further segment."""
ADVICE = {
    "undelivered": "requests were broken off before their answers were whole: raise the agent's own"
    " time limits, or actors.rollout_timeout_seconds",
    "interrupted": "engines were interrupted in the middle of answers, as when actors end",
    "not repeated": "agents that were started again asked otherwise than before: keep times, random"
    " numbers and the like out of their requests",
}
"""What to do about sampled tokens that are left out, by reason."""
REWRITTEN = (
    "agent %r: %d of the last %d turns began a further segment, whose history is computed again: "
    "the agent or the chat template changes what was said before; let the agent send earlier "
    "messages as they were, with those of the policy as it got them"
)
LEFT_OUT = "agent %r: %d of the %d tokens sampled in the last %d turns are left out, most as %r: %s"

log = logging.getLogger(__name__)


class AgentStatistics:
    """Counters of the sessions of agents, and the time that in-process environments took."""

    def __init__(self) -> None:
        self.agent: str | None = None
        """Name of the agent; None in an actor that plays none."""
        self.sessions = 0
        """Sessions that are open now."""
        self.turns = 0
        self.segments = 0
        """Turns of finished rollouts that began a further segment."""
        self.sampled = 0
        """Tokens of finished rollouts, without those that are left out."""
        self.left_out: Counter[str] = Counter(dict.fromkeys(ADVICE, 0))
        """Sampled tokens of finished rollouts that do not train, by reason."""
        self.seconds = {"model": 0.0, "agent": 0.0, "environment": 0.0}
        """Time of sessions that waited for the policy, and for the agent; and that in-process
        environments took to answer, tools included."""
        self._newest: deque[Counter[str]] = deque()
        """Counts of the finished rollouts that have the newest turns."""
        self._sum: Counter[str] = Counter()
        self._warned: set[str] = set()

    @contextmanager
    def session(self, model_seconds: Callable[[], float]) -> Iterator[None]:
        """Count a session while it is open, and in the end its time by who was waited for."""
        began = clock.now()
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1
            waited = model_seconds()
            self.seconds["model"] += waited
            self.seconds["agent"] += max(0.0, clock.now() - began - waited)

    def count(
        self, *, turns: int, segments: int, sampled: int, left_out: Mapping[str, int]
    ) -> None:
        """Count a finished rollout; warn once of each loss that is large over the newest turns."""
        self.segments += segments
        self.sampled += sampled
        self.left_out.update(left_out)
        own = Counter({"turns": turns, "segments": segments, "sampled": sampled, **left_out})
        self._newest.append(own)
        self._sum.update(own)
        while self._sum["turns"] - self._newest[0]["turns"] >= NEWEST:
            self._sum.subtract(self._newest.popleft())
        if self._sum["turns"] < LEAST:
            return
        turns, lost = self._sum["turns"], {reason: self._sum[reason] for reason in self.left_out}
        if self._sum["segments"] > SHARE * turns and "segments" not in self._warned:
            self._warned.add("segments")
            log.warning(REWRITTEN, self.agent, self._sum["segments"], turns)
        count, whole = sum(lost.values()), sum(lost.values()) + self._sum["sampled"]
        if count > SHARE * whole and "left out" not in self._warned:
            self._warned.add("left out")
            reason = max(lost, key=lambda name: lost[name])
            why = ADVICE.get(reason, "see left_out of the rollouts")
            log.warning(LEFT_OUT, self.agent, count, whole, turns, reason, why)

    def statistics(self) -> dict[str, Any]:
        """Return all counters, as JSON."""
        return {
            "agent": self.agent,
            "sessions": self.sessions,
            "turns": self.turns,
            "segments": self.segments,
            "sampled": self.sampled,
            "left_out": dict(self.left_out),
            "seconds": dict(self.seconds),
        }


def merge_agents(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the counters of lives of an actor, oldest first, or of several actors."""
    merged = AgentStatistics()
    for part in parts:
        merged.agent, merged.sessions = part["agent"] or merged.agent, part["sessions"]
        merged.turns += part["turns"]
        merged.segments += part["segments"]
        merged.sampled += part["sampled"]
        merged.left_out.update(part["left_out"])
        for name, seconds in part["seconds"].items():
            merged.seconds[name] += seconds
    return merged.statistics()
