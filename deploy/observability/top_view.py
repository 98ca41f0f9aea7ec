"""A frame of `headway top`: the loop with rates on its arrows, actors, learner, events."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.observability.top_model import (
    TOKENS,
    Event,
    Interval,
    Moment,
    actor_state,
    agent_waits,
    learner_phases,
    token_lags,
    troubles,
    update_seconds,
)
from headway.roles import ProcessName, Role

NARROW = 100
"""Columns below which the loop is a list, and bars are short."""
BAR = 16
"""Width of the longest bar; half of it in a narrow terminal."""
ACTORS = 16
"""Most actors in the table; of more actors, those that generate least are shown."""
EVENTS = 8
COLOURS = {"generates": "green", "does not answer": "bold red"}
LEARNING = {
    "reward": "headway_reward_mean",
    "ESS": "headway_ess",
    "length": "headway_response_length_mean",
    "entropy": "headway_entropy_mean",
    "grad norm": "headway_grad_norm",
}
"""Figures of the newest batch, by label."""
DAY = 86_400.0


def screen(
    interval: Interval, events: Sequence[Event] = (), *, width: int = NARROW
) -> RenderableType:
    """Render one frame for a terminal of `width` columns, 80 or more."""
    now, narrow = interval.now, width < NARROW
    parts: list[RenderableType] = [
        _title(now),
        loop_list(interval) if narrow else Text(loop(interval), no_wrap=True),
        Panel(_actors(interval), title="actors", border_style="dim"),
        Panel(_learner(interval, BAR // 2 if narrow else BAR), title="learner", border_style="dim"),
    ]
    if now.value("headway_agent_turns_total"):
        parts.append(Panel(Text(_agents(interval)), title="agents", border_style="dim"))
    if problems := troubles(now):
        parts.append(Panel(Text("\n".join(problems), "bold red"), border_style="red"))
    if events:
        table = Table.grid(padding=(0, 2))
        for at, text in events[-EVENTS:]:
            table.add_row(Text(f"{_seconds(max(0.0, now.at - at))} ago", "dim"), Text(text))
        parts.append(Panel(table, title="last events", border_style="dim"))
    return Group(*parts)


Labels = tuple[str, str]
"""The two lines of a box, or the two of an arrow: above and below it."""


def _stages(interval: Interval) -> tuple[tuple[Labels, ...], tuple[Labels, ...]]:
    """Return the boxes of the loop with their groups, and the arrows between them with rates."""
    now, groups = interval.now, interval.now.by("headway_groups", "state")
    boxes = (
        ("queued", f"{groups.get('queued', 0):.0f} groups"),
        ("actors", f"{groups.get('leased', 0):.0f} groups"),
        ("ready", f"{groups.get('ready', 0):.0f} groups"),
        ("learner", f"v{_whole(now, 'version')}/{_whole(now, 'steps')}"),
    )
    leased = _rate(interval.rate_of_groups("queued"))
    taken = _rate(interval.rate_of_groups("queued", "leased", "ready", "dropped", "failed"))
    accepted = _rate(interval.rate("headway_results_accepted_total"))
    generated = _rate(interval.rate(TOKENS))
    trained = _rate(interval.rate("headway_tokens_trained_total"))
    arrows = (
        ("lease", f"{leased} groups/s"),
        (f"put {accepted} results/s", f"{generated} tokens/s"),
        (f"take {taken} groups/s", f"{trained} tokens/s"),
    )
    return boxes, arrows


def _ways_back(interval: Interval) -> Labels:
    """Return the texts of the learner's arrows: weights to the actors, and acknowledgements."""
    now = interval.now
    sent = interval.rate("headway_weight_update_bytes_total")
    return (
        f"weights {_rate(interval.rate('headway_weight_updates_total'))} updates/s, "
        f"{'–' if sent is None else decimal(int(sent))}/s, "
        f"{_seconds(update_seconds(interval))} to serve",
        f"ack {_rate(interval.rate('headway_version'))} batches/s: "
        f"{_whole(now, 'live_groups')} of {_whole(now, 'window_groups')} groups live, "
        f"issued {_rate(interval.rate_of_groups())}/s",
    )


def loop_list(interval: Interval) -> Table:
    """Show the loop as a list: each stage with its groups, and where they go at which rates."""
    boxes, arrows = _stages(interval)
    weights, ack = _ways_back(interval)
    table = Table.grid(padding=(0, 2))
    for (stage, content), labels in zip(boxes, (*arrows, (weights,)), strict=True):
        table.add_row(Text(stage, "bold"), content, f"─▶ {', '.join(labels)}")
    table.add_row("", "", f"─▶ {ack}")
    return table


def loop(interval: Interval) -> str:
    """Draw the loop as text: boxes with their groups, arrows with their rates."""
    boxes, arrows = _stages(interval)
    lines = ["", "", "", ""]
    middles = []
    for index, texts in enumerate(boxes):
        width = max(len(text) for text in texts) + 2
        middles.append(len(lines[0]) + width // 2)
        box = (f"┌{'─' * width}┐", *(f"│{text:^{width}}│" for text in texts), f"└{'─' * width}┘")
        lines = [line + part for line, part in zip(lines, box, strict=True)]
        if index < len(arrows):
            above, below = arrows[index]
            width = max(len(above), len(below)) + 2
            parts = (f"{above:^{width}}", "─" * (width - 1) + "▶", f"{below:^{width}}", " " * width)
            lines = [line + part for line, part in zip(lines, parts, strict=True)]
    weights, ack = _ways_back(interval)
    first, actor, _, learner = middles
    left, middle, right = " " * first, " " * (actor - first - 1), " " * (learner - actor - 1)
    lines += [
        f"{left}▲{middle}▲{right}│",
        f"{left}│{middle}└{f' {weights} ':─^{learner - actor - 1}}┤",
        f"{left}└{f' {ack} ':─^{learner - first - 1}}┘",
    ]
    return "\n".join(lines)


def _title(now: Moment) -> Text:
    title = Text.assemble(
        (now.run, "bold"), f"  version {_whole(now, 'version')} of {_whole(now, 'steps')}"
    )
    if (ended := now.value("headway_last_batch_timestamp_seconds")) is not None:
        title.append(f" · last batch {_seconds(max(0.0, now.at - ended))} ago")
    if (bound := now.value("headway_max_staleness")) is not None:
        title.append(f" · staleness at most {bound:.0f}")
        if (window := now.value("headway_staleness_window")) not in (None, bound):
            title.append(f", new groups {window:.0f}")
    restarts = now.by("headway_restarts_total", "restarted_role")
    if parts := [f"{role} {count:.0f}" for role, count in restarts.items() if count]:
        title.append(f" · restarts: {', '.join(parts)}", "yellow")
    return title


def _actors(interval: Interval) -> Table:
    table = Table("name", "state", "version", "rollouts", "tokens/s", "idle", box=None, expand=True)
    now = interval.now
    parsed = (ProcessName.parse(name) for name in now.processes)
    names = [name for name in parsed if name is not None and name.role is Role.ACTOR]
    shown, speeds = names, {name: interval.rate(TOKENS, name) for name in names}
    if len(shown) > ACTORS:
        shown = sorted(shown, key=lambda name: speeds[name] or 0.0)[:ACTORS]
    for name in shown:
        version = now.value("headway_engine_version", engine=name.engine_id)
        behind = 0.0 if version is None else (now.value("headway_version") or 0.0) - version
        state = actor_state(name, now)
        idle = interval.rate("headway_idle_seconds_total", name)
        table.add_row(
            Text(name),
            Text(state, COLOURS.get(state, "yellow")),
            _number(version) + (f" (−{behind:.0f})" if behind > 0 else ""),
            f"{now.value('headway_running_rollouts', name) or 0:.0f}",
            _rate(speeds[name]),
            _number(idle and min(1.0, idle), ".0%"),
        )
    if len(shown) < len(speeds):
        table.add_row(f"and {len(speeds) - len(shown)} that generate more", *[""] * 5)
    return table


def _agents(interval: Interval) -> str:
    """Describe the sessions of agents, their waits, and what of them does not train."""
    now, name = interval.now, "headway_agent_tokens_left_out_total"
    waits = agent_waits(interval)
    lost, kept = interval.gained(name), interval.gained(TOKENS)
    turns, rewritten = (interval.gained(f"headway_agent_{x}_total") for x in ("turns", "segments"))
    reasons = [reason for reason, count in now.by(name, "reason").items() if count]
    return (
        f"{_whole(now, 'agent_sessions')} sessions · "
        f"{_rate(interval.rate('headway_agent_turns_total'))} turns/s · waiting for the model "
        f"{_number(waits.get('model'), '.0%')}, for agents {_number(waits.get('agent'), '.0%')}\n"
        f"{lost / max(1.0, lost + kept):.1%} of the tokens left out"
        f"{' (' + ', '.join(reasons) + ')' if reasons else ''} · "
        f"{rewritten / max(1.0, turns):.1%} of the turns began a further segment"
    )


def _learner(interval: Interval, bar: int) -> Table:
    now, groups = interval.now, interval.now.by("headway_groups", "state")
    left = Table.grid(padding=(0, 1))
    for state in ("queued", "ready"):
        age = now.value(f"headway_{state}_oldest_seconds")
        left.add_row(f"oldest {state} group", _seconds(age) if groups.get(state) else "–")
    left.add_row("waits for groups", _whole(now, "learner_waits_for_groups"))
    figures = {label: now.value(name) for label, name in LEARNING.items()}
    figures["held-out"] = now.value("headway_heldout_score", kind="greedy")
    for label, value in figures.items():
        if value is not None:
            left.add_row(label, f"{value:.4g}")
    if failed := now.value("headway_heldout_failed", kind="greedy"):
        left.add_row("held-out, failed", f"{failed:.0f}")
    table = Table.grid(padding=(0, 3), expand=True)
    phases, lags = learner_phases(interval), token_lags(interval)
    table.add_row(left, _bars("phase", phases, bar), _bars("token lag", lags, bar))
    return table


def _bars(title: str, shares: Mapping[str, float], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(title, "bold"))
    longest = max(shares.values(), default=1.0) or 1.0
    for label, share in shares.items():
        table.add_row(
            label, Text("█" * round(width * share / longest), "cyan"), _number(share, ".0%")
        )
    return table


def _whole(now: Moment, name: str) -> str:
    return _number(now.value(f"headway_{name}"))


def _number(value: float | None, form: str = ".0f") -> str:
    return "–" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return _number(value, ".2g" if value is not None and value < 100 else ",.0f")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 120:
        form = "%H:%M:%S" if value < DAY else f"{value // DAY:.0f} d %H:%M"
        return time.strftime(form, time.gmtime(value))
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
