"""The probe: an engine and the learner score the same few tokens by the same version.

    learner: scores ─▶ broadcaster: sequences ─▶ engine: scores after its swap ─▶ driver: compares

Scores are log-probabilities at temperature 1. Those of the same weights differ by rounding, which
depends on dtype and model. So an engine may differ from the learner by the least of

- 32 roundings of the dtype, at least 1e-4 nats;
- `JUMP` times what the newest honest comparisons of the run differed by;
- `NEARER` times its difference from the learner's scores of any other version;
- nothing, where its scores are still those of its version before, and the learner's have moved.

The first needs no history, the second finds small faults, the last two find old weights, however
small the steps are. Differences are medians, as rounding may send single tokens to other experts.
"""

import math
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

Probing = Literal["auto", "always", "never"]
Sequences = tuple[tuple[int, ...], ...]
Scores = tuple[float, ...]

LENGTH, COUNT, MOST = 40, 2, 8
"""Tokens of a sequence, more than a block of an engine's KV cache; number of sequences, and most
of them where there are many experts."""
SHARE = {"auto": 0.005, "always": math.inf, "never": 0.0}
"""Largest share of the time that probes take."""
LEARNER = "learner"
"""Source of the scores that engines are compared with."""
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8": 2.0**-3}
ROUNDED = 8 * EPSILON["float32"]
"""Rounding of the scores themselves, which are float32 whatever the dtype of the weights."""
JUMP, NEARER, FAR = 8.0, 3.0, 1e6
RECENT, KEPT = 20, 16
"""Honest comparisons, and versions of the learner, that are remembered."""
MOVED = 0.25
"""Share of scores that a version moves in the learner, where none moves in an engine by a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Scores of one version by its learner, or by an engine that serves it."""

    source: str
    """`LEARNER`, or the id of the engine."""
    version: int
    sequences: Sequences
    scores: Scores
    """Log-probability of every token but the first of each sequence, in their order."""
    sampled: Scores = ()
    """Of an engine: that of the last token of each sequence, as it would be sampled in a rollout,
    after what the KV cache has of the tokens before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Comparison of an engine with the learner, a record of `probes.jsonl`."""

    engine_id: str
    version: int
    difference: float
    """Nats that its scores differ by from the learner's."""
    tolerance: float
    """Nats that rounding explains."""
    nearest: int | None = None
    """Version whose scores it has instead; None if it passes, or has those of none."""

    @property
    def fails(self) -> bool:
        """True if the engine serves other weights than its version has."""
        return self.difference > self.tolerance


def probe_sequences(vocabulary: int, longest: int | None, *, experts: float = 1.0) -> Sequences:
    """Return fixed sequences of tokens below `vocabulary`, none longer than `longest`.

    `experts` is the number of experts for each that a token chooses: each gets some ten tokens.
    """
    count = min(MOST, max(COUNT, math.ceil(10 * experts / LENGTH)))
    draw, length = random.Random(0), min(LENGTH, longest or LENGTH)
    return tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count))


def difference(engine: ProbeReport, learner: ProbeReport) -> float:
    """Return the nats by which an engine's scores differ from those of a version.

    What is sampled counts by the sequence that differs least: all read an old KV cache or none.
    """
    last = range(-1, len(learner.scores), len(learner.sequences[0]) - 1)[1:]
    expected = [learner.scores[place] for place in last]
    scored, sampled = (
        [abs(a - b) if math.isfinite(a - b) else FAR for a, b in zip(*pair, strict=True)]
        for pair in ((engine.scores, learner.scores), (engine.sampled, expected))
    )
    return max(median(scored), min(sampled))


class ProbeCheck:
    """Compares engines with the learner, in the order in which they report.

    Args:
        dtypes: Those that weights are trained, sent and served in.
        exact: Engines serve the learner's weights bit for bit.
    """

    def __init__(self, dtypes: Iterable[str], *, exact: bool) -> None:
        self.limit = max(1e-4, 32 * max(EPSILON.get(it, EPSILON["bfloat16"]) for it in dtypes))
        self.exact = exact
        self._learned: dict[int, ProbeReport] = {}
        self._before: dict[str, ProbeReport] = {}
        """Newest scores of each engine."""
        self._honest: deque[float] = deque(maxlen=RECENT)

    def observe(self, report: ProbeReport) -> ProbeResult | None:
        """Add a report; return the comparison if it is an engine's, and can be compared."""
        version, engine_id = report.version, report.source
        if engine_id == LEARNER:  # one that was made again begins with an older version
            kept = {v: r for v, r in self._learned.items() if version - KEPT < v < version}
            self._learned = kept | {version: report}
            return None
        nats = {
            v: difference(report, learner)
            for v, learner in self._learned.items()
            if learner.sequences == report.sequences
        }
        if version not in nats:
            return None
        differs, bounds = nats.pop(version), [self.limit]
        nearest = min(nats, key=nats.__getitem__, default=None)
        if self._honest:
            bounds.append(max(JUMP * median(self._honest), ROUNDED))
        if nearest is not None:
            bounds.append(max(NEARER * nats[nearest], ROUNDED))
            if NEARER * nats[nearest] > differs:
                nearest = None
        if (before := self._kept(report)) is not None:
            bounds, nearest = [0.0], before
        self._before[engine_id] = report
        result = ProbeResult(
            engine_id=engine_id, version=version, difference=differs, tolerance=min(bounds)
        )
        if not result.fails:
            self._honest.append(differs)
        return replace(result, nearest=nearest) if result.fails else result

    def _kept(self, report: ProbeReport) -> int | None:
        """Return the version before of an engine that has the very scores of it, by no chance."""
        before = self._before.get(report.source)
        if not self.exact or before is None or before.version not in self._learned:
            return None
        if (before.scores, before.sampled) != (report.scores, report.sampled):
            return None
        old, new = (self._learned[it.version].scores for it in (before, report))
        moved = sum(a != b for a, b in zip(old, new, strict=True))
        return before.version if moved > MOVED * len(new) else None


class ProbeBudget:
    """Decides which versions are probed: all, or so many that probes take a share of the time.

    The cost of a probe is its shortest time so far, as it also waits for others' work, and the
    first one for what is made ready then.
    """

    def __init__(self, probing: Probing) -> None:
        self._share, self._seconds, self._next = SHARE[probing], math.inf, -math.inf

    def allows(self) -> bool:
        """Return True if a probe may begin now."""
        return self._share > 0 and time.monotonic() >= self._next

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Measure a probe."""
        begin, is_first = time.monotonic(), self._seconds == math.inf
        yield
        self._seconds = min(self._seconds, time.monotonic() - begin)
        self._next = begin + (0.0 if is_first else self._seconds / self._share)
