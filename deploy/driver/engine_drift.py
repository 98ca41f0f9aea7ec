"""Finds engines that drift: they sample with other probabilities than the learner's weights give.

    probes of each version ─▶ difference from the learner ─┐
    batches ─▶ evidence against each engine ───────────────┴▶ alert ─▶ full re-send ─▶ restart

A probe compares one engine with the learner, and names it at once (`weight_sync.probe`).

The learner compares the engines of each batch (`learner.diagnostics.engine_comparison`). An engine
drifts if both evidence and size reach one of the `LIMITS`:

- Evidence grows by z − ½ with each batch in which the engine has a rank score z, and is never below
  0. As E exp(z − ½) ≤ 1 for an engine that is like the others, it comes to ln n by chance at most
  once in n batches on average, whatever the noise (Shin, Ramdas and Rinaldo 2024, "E-detectors").
- Size is its mismatch over that of the others, a mean over the newest batches. Other kernels, GPUs
  or prompts raise a mismatch too, but do not double it.

By the first limit, chance names an engine less often than once in 10,000 batches. In simulations of
120,000 batches, both named one, where the noise of groups differed by factors of ten and more. With
8 groups of each of two engines a batch, an engine with three times the mismatch of the other is
named after about five batches; with one group of each, a thousand times the mismatch after eleven.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.engines.model_folder import served_dtype
from deploy.driver.actor_supervisor import ActorSupervisor
from deploy.driver.run_context import RunContext
from learner.diagnostics.batch_report import EngineFigures, TrainedBatch
from weight_sync.probe import EPSILON, ProbeCheck, ProbeReport, ProbeResult

Response = Literal["alert", "resend", "restart"]

LIMITS = ((math.log(10_000), 2.0), (math.log(10), 100.0))
"""Pairs of evidence and ratio. No noise multiplies the mismatch by a hundred for several batches,
and a small batch gives little evidence."""
MOST_EVIDENCE = LIMITS[0][0]
MEMORY = 0.9
"""Weight of the mean ratio before, with each batch; it reaches back some ten batches."""
WELL_BATCHES = 20
"""An engine that was named counts as well again after so many comparisons without a finding."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Evidence of the batches so far that one engine differs from the others."""

    evidence: float = 0.0
    log_ratio: float = 0.0
    """Weighted sum of the logarithms of its mismatch ratios."""
    weight: float = 2.0
    """Sum of the weights; at first, as if two batches had shown no difference."""
    since_named: int = WELL_BATCHES
    """Comparisons since it was last found to drift."""

    def after(self, figures: EngineFigures) -> "Suspicion":
        """Add a batch; one in which it could not be compared changes nothing."""
        if figures.rank_score is None or figures.mismatch_ratio is None:
            return self
        new = Suspicion(
            evidence=min(max(self.evidence + figures.rank_score - 0.5, 0.0), MOST_EVIDENCE),
            log_ratio=MEMORY * self.log_ratio + math.log(figures.mismatch_ratio),
            weight=MEMORY * self.weight + 1,
            since_named=self.since_named + 1,
        )
        return Suspicion(new.evidence, new.log_ratio, new.weight, 0) if new.drifts else new

    @property
    def ratio(self) -> float:
        """Mismatch of the engine over that of the others."""
        return math.exp(self.log_ratio / self.weight)

    @property
    def drifts(self) -> bool:
        """True if the engine disagrees with the learner, and the others do not."""
        return any(self.evidence >= least and self.ratio >= ratio for least, ratio in LIMITS)

    @property
    def named(self) -> bool:
        """True if the engine drifts, or did and is not known to be well again."""
        return self.since_named < WELL_BATCHES


@dataclass(frozen=True, slots=True)
class Finding:
    """An engine that was found to drift, a record of `drift.jsonl`."""

    engine_id: str
    version: int
    mismatch_ratio: float | None
    """None if a probe found it."""
    mismatch_fresh: float | None
    response: Response
    probe: ProbeResult | None = None
    """None if batches found it."""

    def __str__(self) -> str:
        """Say what was found."""
        if (probe := self.probe) is None:
            return (
                f"{self.engine_id} drifts: its log-probabilities differ from the learner's "
                f"{self.mismatch_ratio:.3g} times as much as those of the other engines (batch "
                f"{self.version})"
            )
        old = "" if probe.nearest is None else f", and are those of version {probe.nearest}"
        return (
            f"{self.engine_id} does not serve the weights of version {self.version}: its "
            f"log-probabilities of the probe differ from the learner's by {probe.difference:.3g} "
            f"nats, where rounding explains {probe.tolerance:.3g}{old}"
        )


class DriftDetector:
    """Decides from batch to batch which engines drift, and what is to be done about each.

    `response` is the most that may be done; without `resends`, a restart comes first.
    """

    def __init__(self, response: Response, *, resends: bool) -> None:
        self._response, self._resends = response, resends
        self._suspicions: dict[str, Suspicion] = {}
        self._resent: set[str] = set()
        """Engines that were sent a version again, and are not yet known to be well."""
        self._failed: dict[str, bool] = {}
        """Engines that were probed, and whether their newest probe failed."""
        self._ignored: dict[str, float] = {}
        """The batches of an engine that are ignored are those before this version."""

    @property
    def named(self) -> Mapping[str, bool]:
        """All engines that were compared, and whether each is named."""
        by_batches = {engine for engine, it in self._suspicions.items() if it.named}
        by_probes = {engine for engine, fails in self._failed.items() if fails}
        compared = self._suspicions.keys() | self._failed.keys()
        return {engine: engine in by_batches | by_probes for engine in sorted(compared)}

    def observe(self, version: int, engines: Mapping[str, EngineFigures]) -> list[Finding]:
        """Add the batch of a version; return the engines that something is to be done about.

        Such an engine is ignored until `settle` is called, if more than an alert is done.
        """
        findings = []
        for engine, figures in engines.items():
            if version < self._ignored.get(engine, 0.0):
                continue
            before = self._suspicions.get(engine, Suspicion())
            self._suspicions[engine] = now = before.after(figures)
            if not self.named[engine]:
                self._resent.discard(engine)
            if not now.drifts or (self._response == "alert" and before.named):
                continue
            response = self._next_response(engine)
            findings.append(Finding(engine, version, now.ratio, figures.mismatch_fresh, response))
            if response != "alert":
                self._suspicions[engine] = Suspicion(since_named=0)
                self._ignored[engine] = math.inf
        return findings

    def probed(self, result: ProbeResult) -> Finding | None:
        """Add a probe; return what is to be done about the engine, as `observe` does."""
        engine, before = result.engine_id, self._failed.get(result.engine_id, False)
        self._failed[engine] = result.fails
        if not self.named[engine]:
            self._resent.discard(engine)
        waits = self._ignored.get(engine) == math.inf
        if not result.fails or waits or (self._response == "alert" and before):
            return None
        response = self._next_response(engine)
        if response != "alert":
            self._ignored[engine] = math.inf
        return Finding(engine, result.version, None, None, response, result)

    def settle(self, engine: str, version: int) -> None:
        """Watch an engine again, from the batch of `version`: what it sampled before is trained."""
        self._ignored[engine] = version

    def _next_response(self, engine: str) -> Response:
        if self._response != "restart":
            return self._response
        if not self._resends or engine in self._resent:
            self._resent.discard(engine)
            return "restart"
        self._resent.add(engine)
        return "resend"


class DriftWatch:
    """Names the engines of a run that drift, re-sends weights to them or restarts their actors."""

    def __init__(self, context: RunContext, actors: Sequence[ActorSupervisor]) -> None:
        self._context, self._actors = context, actors  # a list that grows
        weight_sync = context.config.weight_sync
        self._detector = DriftDetector(weight_sync.on_drift, resends=weight_sync.staged)
        self._check = probe_check(context)
        self._findings: asyncio.Queue[Finding] = asyncio.Queue()

    def observe(self, batches: Iterable[TrainedBatch]) -> list[Finding]:
        """Print and return the findings of the next batches; `follow` responds to them."""
        known, findings = {actor.engine_id for actor in self._actors}, []
        for batch in batches:  # its engines may be of earlier sessions with more actors
            ours = {name: it for name, it in (batch.report.engines or {}).items() if name in known}
            findings += self._detector.observe(batch.version, ours)
        self._context.record.drifting = dict(self._detector.named)
        self._tell(findings)
        return findings

    def probed(self, reports: Iterable[ProbeReport]) -> tuple[list[ProbeResult], list[Finding]]:
        """Return the comparisons of the next probes, and the findings, as `observe` does."""
        results = [result for report in reports if (result := self._check.observe(report))]
        record = self._context.record
        for result in results:
            record.probes[result.engine_id] = result
            record.failed_probes[result.engine_id] += result.fails
        findings = [finding for result in results if (finding := self._detector.probed(result))]
        record.drifting = dict(self._detector.named)
        self._tell(findings)
        return results, findings

    def _tell(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._context.console.say(f"{finding}; {_RESPONSES[finding.response]}")
            if finding.response != "alert":
                self._findings.put_nowait(finding)

    async def follow(self) -> None:
        """Respond to findings until cancelled, to one after the other."""
        record = self._context.record
        while True:
            finding = await self._findings.get()
            [actor] = [a for a in self._actors if a.engine_id == finding.engine_id]
            if finding.response == "resend":
                await actor.resend()
            else:
                others = "the others" if finding.probe is None else "the learner"
                actor.restart(f"its engine drifts from {others}")
            # Until now it may have sampled with the next version, which may lag by the bound.
            self._detector.settle(finding.engine_id, record.version + 2 + record.max_staleness)


def probe_check(context: RunContext) -> ProbeCheck:
    """Return the comparison of probes in the dtypes of a run."""
    config, wire = context.config, context.config.weight_sync.wire_dtype
    served = served_dtype(context.inputs.model_path, config.actors.dtype)
    dtypes = {config.learner.dtype, served, *({wire} - {"as_trained"})}
    cached = config.actors.vllm_options.get("kv_cache_dtype", "auto")
    if cached != "auto":
        dtypes.add(cached if cached in EPSILON else "float8")
    return ProbeCheck(dtypes)


_RESPONSES = {
    "alert": "nothing is done, as weight_sync.on_drift says",
    "resend": "it is sent the newest weights again",
    "restart": "its actor is restarted",
}
