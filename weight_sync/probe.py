"""The probe: an engine and the learner score the same few tokens by the same version.

    learner: scores ─▶ broadcaster: sequences ─▶ engine: scores after its swap ─▶ driver: compares

Scores are log-probabilities at temperature 1. Those of the same weights differ by rounding, which
depends on dtype and model. So an engine may differ from the learner by the least of

- 32 roundings of the dtype, at least 1e-4 nats;
- `FACTOR` times what the newest honest comparisons of the run differed by;
- `FACTOR` times its difference from the learner's scores of any other version;
- nothing, where its scores stay the same to the bit and the learner's move.

Differences are medians, as rounding may send single tokens to other experts.
"""

import math
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Probing = Literal["auto", "always", "never"]
Sequences = tuple[tuple[int, ...], ...]
Scores = tuple[float, ...]

LENGTH = 40
"""Tokens of a sequence: more than a block of an engine's KV cache."""
COUNT, COUNT_OF_EXPERTS = 2, 8
"""Sequences, and those of a model with experts, of which each token chooses a few."""
SHARE = {"auto": 0.005, "always": math.inf, "never": 0.0}
"""Largest share of the time that probes take."""
LEARNER = "learner"
"""Source of the scores that engines are compared with."""
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8": 2.0**-3}
ROUNDED = 8 * EPSILON["float32"]
"""Rounding of the scores themselves, which are float32 whatever the dtype of the weights."""
FACTOR, FAR = 4.0, 1e6
RECENT, KEPT = 20, 16
"""Honest comparisons, and versions of the learner before the newest, that are remembered."""
MOVED = 0.01
"""Share of `ProbeCheck.limit` by which a quarter of the learner's scores moves with new weights."""


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


def probe_sequences(config: Any, longest: int | None) -> Sequences:
    """Return fixed sequences of tokens for the config of a text model, none above `longest`."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    has_experts = any(getattr(config, name, None) for name in experts)
    draw, length = random.Random(0), min(LENGTH, longest or LENGTH)
    return tuple(
        tuple(draw.randrange(config.vocab_size) for _ in range(length))
        for _ in range(COUNT_OF_EXPERTS if has_experts else COUNT)
    )


def difference(engine: ProbeReport, learner: ProbeReport) -> float:
    """Return the nats by which an engine's scores differ from those of a version.

    What is sampled counts by the sequence that differs least from the engine's own scores, for all
    read an old KV cache or none; and by half, as rounding moves a few tokens further than a median.
    """
    places = range(-1, len(engine.scores), len(engine.sequences[0]) - 1)[1:]
    last = [engine.scores[place] for place in places]
    scored, sampled = (
        [abs(a - b) if math.isfinite(a - b) else FAR for a, b in zip(*pair, strict=True)]
        for pair in ((engine.scores, learner.scores), (engine.sampled, last))
    )
    return max(median(scored), min(sampled) / 2)


class ProbeCheck:
    """Compares engines with the learner, in the order in which they report.

    Args:
        dtypes: Those that weights are trained, sent and served in.
    """

    def __init__(self, dtypes: Iterable[str]) -> None:
        self.limit = max(1e-4, 32 * max(EPSILON.get(it, EPSILON["bfloat16"]) for it in dtypes))
        self._learned: dict[int, ProbeReport] = {}
        self._first: dict[str, ProbeReport] = {}
        """The first report of each engine with the scores that it has now."""
        self._honest: deque[float] = deque(maxlen=RECENT)

    def observe(self, report: ProbeReport) -> ProbeResult | None:
        """Add a report; return the comparison if it is an engine's, and can be compared."""
        version, engine_id = report.version, report.source
        if engine_id == LEARNER:  # one that was made again begins with an older version
            older = [(v, learner) for v, learner in self._learned.items() if v < version]
            self._learned = dict([*older[-KEPT:], (version, report)])
            return None
        nats = {
            v: difference(report, learner)
            for v, learner in self._learned.items()
            if learner.sequences == report.sequences
        }
        if version not in nats:
            return None
        differs = nats.pop(version)
        rounding = [*nats.values(), *([median(self._honest)] if self._honest else [])]
        tolerance = min(self.limit, max(FACTOR * min(rounding, default=math.inf), ROUNDED))
        served = [v for v in nats if FACTOR * nats[v] <= differs]
        nearest = min(served, key=nats.__getitem__, default=None)
        if (kept := self._kept(report)) is not None:
            tolerance, nearest = 0.0, kept
        if differs <= tolerance:
            self._honest.append(differs)
            nearest = None
        return ProbeResult(
            engine_id=engine_id, version=version, difference=differs, tolerance=tolerance,
            nearest=nearest,
        )  # fmt: skip

    def _kept(self, report: ProbeReport) -> int | None:
        """Return the version whose very scores an engine has kept, though the learner's moved."""
        first = self._first.setdefault(report.source, report)
        same = (first.scores, first.sampled) == (report.scores, report.sampled)
        if not same or first.version not in self._learned:
            self._first[report.source] = report
            return None
        old, new = (self._learned[version].scores for version in (first.version, report.version))
        moves = sorted(abs(a - b) for a, b in zip(old, new, strict=True))
        return first.version if moves[len(moves) * 3 // 4] > MOVED * self.limit else None


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
