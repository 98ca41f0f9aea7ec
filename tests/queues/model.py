"""What a broker must do, as plainly as it can be said: one list, searched from end to end.

The rules are those of `queues.policy.admission`, by brute force. Nothing is shared with the code
under test but its records. Leaves out time: whoever drives the model says which leases have
expired.
"""

from collections import Counter
from dataclasses import dataclass, field

UNREACHABLE = "version_not_reached"
EXCUSED = ("engine_lost", "infrastructure", "reward_model_lost", "unclaimed")


@dataclass(eq=False)
class ModelGroup:
    number: int
    prompt_id: str
    evaluation: str | None
    state: str = "queued"
    reason: str = ""
    attempt: int = 0
    failures: int = 0
    engine: str | None = None
    start: int | None = None
    due: int | None = None
    anew: bool = False
    """Whether it was issued in the place of one that was dropped."""
    late: bool = False
    """The batch that it was due with was taken without it."""
    payload: bytes | None = None
    kept: tuple[int, bytes] | None = None
    """What was saved of it: its oldest version, and the payload."""
    goes_on: bool = False
    """Whether its next lease may carry that."""
    notes: dict[tuple[int, str], tuple[int, bytes]] = field(default_factory=dict)
    """Oldest version and payload of what was noted of its rollouts."""
    noted: int | None = None
    """The oldest version of all notes; None if its next lease may not carry them."""
    inherited: int = 0
    """Attempt of its lease by the broker before this one, until its holder's first heartbeat."""

    @property
    def carried(self):
        """Saved payload and notes that the present lease carries."""
        notes = {name: payload for name, (_, payload) in self.notes.items()}
        return self.kept and self.kept[1], notes

    @property
    def begun(self):
        """The oldest version that the next lease may go on from."""
        saved = [self.kept[0]] if self.kept and self.goes_on else []
        return min([*saved, *([] if self.noted is None else [self.noted])], default=None)

    def forget(self):
        self.kept, self.notes, self.noted = None, {}, None

    @property
    def group_id(self):
        return f"{'g' if self.evaluation is None else 'e'}{self.number:08d}"


@dataclass
class Model:
    """The broker's settings, the filter's limit in groups (None: no filter), and the state."""

    size: int
    staleness: int
    group_size: int
    steps: int
    max_attempts: int
    limit: int | None
    on_overdue: str = "wait"
    groups: list[ModelGroup] = field(default_factory=list)
    line: list[ModelGroup] = field(default_factory=list)
    """Queued groups, in the order in which they are leased."""
    ready: list[ModelGroup] = field(default_factory=list)
    """In the order of arrival, which decides nothing."""
    taken: list[ModelGroup] = field(default_factory=list)
    batches: list[list[ModelGroup]] = field(default_factory=list)
    """Trained ones, by version."""
    evaluations: dict[str, int] = field(default_factory=dict)
    """The least version of each, in the order of their queuing."""
    engines: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    cursor: str | None = None
    token: str | None = None
    """Of the last issue."""
    ended: bool = False
    filtered: int = 0
    """Since the last batch was taken."""
    duplicates: int = 0

    @property
    def version(self):
        return len(self.batches)

    def train(self, *states):
        return [g for g in self.groups if g.evaluation is None and g.state in states]

    @property
    def live(self):
        return self.train("leased", "ready", "taken")

    @property
    def training_over(self):
        return self.version >= self.steps or (
            self.ended and not self.live and not self.train("queued")
        )

    @property
    def over(self):
        return self.training_over and all(
            g.state in ("scored", "failed") for g in self.groups if g.evaluation is not None
        )

    # --- rules 1 and 2

    def feasible(self, dues, version):
        """For every date d ≥ version − 1 at most (d − version + 1)·B are due by d."""
        return all(
            sum(due <= date for due in dues) <= (date - version + 1) * self.size
            for date in range(version - 1, max([version, *dues]) + 1)
        )

    def allowed(self, start, more=()):
        """Leases of an engine at `start`, beside what is live and groups `more` by their dates."""
        dues = [*(g.due for g in self.live if not g.late), *more]
        late = sum(g.late for g in self.live)
        window = min(self.staleness + 1, max(0, self.steps - self.version)) * self.size
        count = 0
        while len(dues) + late < window:
            dues.append(start + self.staleness)
            if not self.feasible(dues, self.version):
                break
            count += 1
        return count

    # --- operations

    def issue(self, prompt_ids, evaluation=None):
        for prompt_id in prompt_ids:
            group = ModelGroup(len(self.groups) + 1, prompt_id, evaluation)
            self.groups.append(group)
            self.line.append(group)

    def lease(self, engine, room):
        version, leased = self.engines[engine], []
        for name, least in self.evaluations.items():
            if least <= version:
                waiting = [g for g in self.line if g.evaluation == name]
                leased += waiting[: room - len(leased)]
        count = min((room - len(leased)) // self.group_size, self.allowed(version))
        leased += [g for g in self.line if g.evaluation is None][:count]
        for after, group in zip(range(len(leased))[::-1], leased, strict=True):
            self.line.remove(group)
            start = version
            if group.begun is not None:
                first = min(version, group.begun)
                rest = self.allowed(version, [first + self.staleness])
                if self.allowed(first) and rest >= after:
                    start = first
                else:
                    group.goes_on, group.noted = False, None
            if not group.goes_on:
                group.kept = None
            if group.noted is None:
                group.notes = {}
            group.attempt += 1
            group.state, group.engine, group.start = "leased", engine, start
            group.due = None if group.evaluation else start + self.staleness
        return leased

    def save(self, group, engine, attempt, kept):
        if self.holds(group, engine, attempt) and group.evaluation is None:
            group.kept, group.goes_on = kept, True

    def note(self, group, engine, attempt, name, note):
        """Return the payload that stays."""
        if not self.holds(group, engine, attempt) or group.evaluation is not None:
            return note[1]
        group.noted = note[0] if group.noted is None else min(group.noted, note[0])
        return group.notes.setdefault(name, note)[1]

    def holds(self, group, engine, attempt):
        return (group.state, group.engine, group.attempt) == ("leased", engine, attempt)

    def put(self, group, payload, *, tied):
        group.payload = payload
        group.forget()
        if group.evaluation is not None:
            group.state = "scored"
        elif self.limit is not None and tied and self.filtered < self.limit:
            self.filtered += 1
            group.state, group.reason, group.due = "dropped", "filtered", None
        else:
            group.state = "ready"
            self.ready.append(group)

    def give_back(self, group, reason):
        group.failures += reason not in EXCUSED
        if group.failures > 1 and reason not in EXCUSED:
            group.noted = None
        group.due, group.late = None, False
        if group.failures < self.max_attempts:
            group.state = "queued"
            self.line.insert(0, group)
        else:
            group.state, group.reason = "failed", reason
            group.forget()

    def claim(self, engine, held):
        """Give back what the broker before leased to the engine and it does not hold."""
        for group in self.groups:
            if not group.inherited or group.engine != engine:
                continue
            lease, group.inherited = (group.group_id, group.inherited), 0
            if lease not in held and self.holds(group, engine, lease[1]):
                self.give_back(group, "unclaimed")

    def take(self):
        ready = sorted(self.ready, key=lambda g: (g.due, g.group_id))
        short_is_right = self.ended and not self.train("queued", "leased")
        left = [g.due for g in ready[self.size :]] + [g.due for g in self.train("leased")]
        enough = len(ready) >= self.size or (short_is_right and ready)
        waits = self.on_overdue == "wait" and not self.feasible(left, self.version + 1)
        if not enough or waits:
            return None
        self.taken = ready[: self.size]
        for group in self.taken:
            self.ready.remove(group)
            group.state, group.due, group.late = "taken", self.version, False
        self.filtered = 0
        self.pass_over(self.version)
        return self.taken

    def pass_over(self, last):
        """Mark groups due by `last` and not taken as late, or drop and issue them again first."""
        missed = [g for g in self.train("leased", "ready") if not g.late and g.due <= last]
        for group in missed:
            group.late = self.on_overdue != "drop"
        if self.on_overdue != "drop":
            return
        begun = len(self.groups)
        for group in missed:
            if group in self.ready:
                self.ready.remove(group)
            group.state, group.reason, group.due = "dropped", "overdue", None
            group.forget()
            anew = ModelGroup(len(self.groups) + 1, group.prompt_id, None, anew=True)
            anew.failures = group.failures
            self.groups.append(anew)
        self.line = self.groups[begun:] + self.line

    def ack(self):
        for group in self.taken:
            group.state, group.due = "trained", None
        self.batches.append(self.taken)
        self.taken = []

    def fail_unreachable(self):
        """Fail the evaluations of versions that training ended before."""
        if not self.training_over:
            return
        for group in list(self.line):
            if group.evaluation and self.evaluations[group.evaluation] > self.version:
                self.line.remove(group)
                group.state, group.reason = "failed", UNREACHABLE

    def restart(self, *, takes_over):
        """Leases are void, their groups go first, and what is not durable is forgotten.

        A broker that `takes_over` knows the leases and engines of the one before.
        """
        for group in self.groups:
            group.failures, group.late, group.goes_on, group.inherited = 0, False, True, 0
            group.noted = min((version for version, _ in group.notes.values()), default=None)
            if group.state == "leased" and takes_over:
                group.inherited = group.attempt
            elif group.state == "leased":
                group.state, group.due = "queued", None
        queued = [g for g in self.groups if g.state == "queued"]
        first = [g for g in queued if g.attempt or g.anew]
        self.line = first + [g for g in queued if g not in first]
        self.ready = [g for g in self.groups if g.state == "ready"]
        if not takes_over:
            self.engines = {}
        self.pass_over(self.version - (not self.taken))

    # --- what shows

    def accounts(self):
        """As `Accounting.to_dict`."""
        train = [g for g in self.groups if g.evaluation is None]
        heldout = [g for g in self.groups if g.evaluation is not None]
        plain = ("queued", "leased", "ready", "taken", "trained")
        return {
            "issued": len(train),
            **{state: sum(g.state == state for g in train) for state in plain},
            **{
                state: dict(Counter(g.reason for g in train if g.state == state))
                for state in ("dropped", "failed")
            },
            "trained_twice": 0,
            "duplicates": self.duplicates,
            "heldout_failed": dict(Counter(g.reason for g in heldout if g.state == "failed")),
            "balanced": True,
        }
