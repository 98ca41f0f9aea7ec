"""A frame of `headway top`: the loop with rates on its arrows, actors, learner, events.

Pure: `top_model.View` to a renderable of rich.
"""

import time
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.observability.top_model import View

BAR = 20
"""Width of the longest bar."""
ACTORS = 16
"""Most actors in the table; of more actors, those that generate least are shown."""
EVENTS = 8
COLOURS = {"generates": "green", "does not answer": "bold red"}
DAY = 86_400.0


def screen(view: View) -> RenderableType:
    """Render one frame, for a terminal of at least 100 columns; narrower terminals cut it."""
    parts: list[RenderableType] = [
        _title(view),
        Text(loop(view), no_wrap=True),
        Panel(_actors(view), title="actors", border_style="dim"),
        Panel(_learner(view), title="learner", border_style="dim"),
    ]
    if view.troubles:
        parts.append(Panel(Text("\n".join(view.troubles), "bold red"), border_style="red"))
    if view.events:
        table = Table.grid(padding=(0, 2))
        for event in view.events[-EVENTS:]:
            table.add_row(Text(f"{_seconds(view.at - event.at)} ago", "dim"), Text(event.text))
        parts.append(Panel(table, title="last events", border_style="dim"))
    return Group(*parts)


def loop(view: View) -> str:
    """Draw the loop as text: boxes with their groups, arrows with their rates."""
    rates, groups = view.rates, view.groups
    boxes = (
        ("queued", f"{groups.get('queued', 0)} groups"),
        ("actors", f"{groups.get('leased', 0)} groups"),
        ("ready", f"{groups.get('ready', 0)} groups"),
        ("learner", f"v{_or_dash(view.version)}/{_or_dash(view.steps)}"),
    )
    arrows = (
        ("lease", f"{_rate(rates.leased)} groups/s"),
        (f"put {_rate(rates.accepted)} results/s", f"{_rate(rates.tokens_generated)} tokens/s"),
        (f"take {_rate(rates.taken)} groups/s", f"{_rate(rates.tokens_trained)} tokens/s"),
    )
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
    size = "–" if rates.update_bytes is None else decimal(int(rates.update_bytes))
    weights = f" weights {_rate(rates.updates)} updates/s, {size}/s"
    weights += f", {_seconds(view.update_seconds)} to serve "
    ack = f" ack {_rate(rates.trained)} batches/s: {_or_dash(view.live)} of"
    ack += f" {_or_dash(view.window)} groups live, issued {_rate(rates.issued)}/s "
    first, actor, _, learner = middles
    lines.append(_marks({first: "▲", actor: "▲", learner: "│"}))
    lines.append(_marks({first: "│"}) + _elbow(first + 1, actor, learner, weights, "┤"))
    lines.append(_elbow(0, first, learner, ack, "┘"))
    return "\n".join(lines)


def _marks(marks: Mapping[int, str]) -> str:
    return "".join(marks.get(column, " ") for column in range(max(marks) + 1))


def _elbow(start: int, left: int, right: int, text: str, end: str) -> str:
    """Draw a line from `left` to `right` with a text in it, after blanks from `start` on."""
    return " " * (left - start) + "└" + f"{text:─^{right - left - 1}}" + end


def _title(view: View) -> Text:
    title = Text.assemble(
        (view.run, "bold"), f"  version {_or_dash(view.version)} of {_or_dash(view.steps)}"
    )
    if view.seconds_since_batch is not None:
        title.append(f" · last batch {_seconds(view.seconds_since_batch)} ago")
    if view.max_staleness is not None:
        title.append(f" · staleness at most {view.max_staleness}")
    return title


def _actors(view: View) -> Table:
    table = Table("name", "state", "version", "rollouts", "tokens/s", "idle", box=None, expand=True)
    shown = view.actors
    if len(shown) > ACTORS:
        shown = sorted(shown, key=lambda actor: actor.tokens_per_second or 0.0)[:ACTORS]
    for actor in shown:
        behind = (view.version or 0) - (actor.version or 0)
        lag = f" (−{behind})" if behind > 0 and actor.version is not None else ""
        table.add_row(
            Text(actor.name),
            Text(actor.state, COLOURS.get(actor.state, "yellow")),
            f"{_or_dash(actor.version)}{lag}",
            str(actor.running),
            _rate(actor.tokens_per_second),
            _share(actor.idle),
        )
    if len(shown) < len(view.actors):
        table.add_row(f"and {len(view.actors) - len(shown)} that generate more", *[""] * 5)
    return table


def _learner(view: View) -> Table:
    table = Table.grid(padding=(0, 3), expand=True)
    left = Table.grid(padding=(0, 1))
    ages = {"queued": view.oldest_queued_seconds, "ready": view.oldest_ready_seconds}
    for state, age in ages.items():
        left.add_row(f"oldest {state} group", _seconds(age) if view.groups.get(state) else "–")
    left.add_row("waits for groups", _or_dash(view.waits_for))
    for label, value in view.learning.items():
        left.add_row(label, f"{value:.4g}")
    table.add_row(left, _bars("phase", view.phases), _bars("token lag", view.lags))
    return table


def _bars(title: str, shares: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(title, "bold"))
    longest = max(shares.values(), default=1.0) or 1.0
    for label, share in shares.items():
        table.add_row(label, Text("█" * round(BAR * share / longest), "cyan"), _share(share))
    return table


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 120:
        form = "%H:%M:%S" if value < DAY else f"{value // DAY:.0f} d %H:%M"
        return time.strftime(form, time.gmtime(value))
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
