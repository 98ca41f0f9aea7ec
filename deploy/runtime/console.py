"""What one sees of a command on the terminal: its phases, then one line that moves.

Without a terminal (a log file, CI) the same figures appear as plain lines now and then.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from learner.supervised.reward_model import RewardProgress
from learner.supervised.sft import SftProgress

PLAIN_SECONDS = 10.0
"""Between two plain lines where there is no terminal."""


class Screen:
    """Prints phases and progress. `with screen.bar(total): screen.advance(done, text)`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._total = 0
        self._printed_at = -PLAIN_SECONDS
        self._scores = ""

    def say(self, text: str) -> None:
        """A line with the seconds since the command began."""
        elapsed = time.monotonic() - self._started
        self.console.print(f"[dim]{elapsed:6.1f} s[/]  {text}", soft_wrap=True)

    @contextmanager
    def bar(self, total: int, waiting_for: str) -> Iterator[None]:
        """Shows the moving line while the block runs."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TextColumn("· left"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            bar.add_task(waiting_for, total=total)
            self._bar, self._total = bar, total
            yield
        self._bar = None

    def advance(self, done: int, text: str) -> None:
        """Moves the line to `done` steps."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)
        now = time.monotonic()
        due = now - self._printed_at > PLAIN_SECONDS or done in (1, self._total)
        if due and not self.console.is_terminal:
            self._printed_at = now
            self.say(f"step {done}/{self._total} · {text}")

    def batch(self, row: Mapping[str, Any], *, tokens_per_second: float | None) -> None:
        """One batch of reinforcement."""
        speed = "" if tokens_per_second is None else f" · {tokens_per_second:,.0f} tokens/s"
        trained = "every token masked"
        if row["max_lag"] is not None:
            trained = (
                f"lag {row['lag_mean']:.2f} (max {row['max_lag']})"
                f" · length {row['response_length_mean']:.0f}"
            )
        self.advance(
            row["version"] + 1,
            f"reward {row['reward_mean']:.3f}{self._scores} · {trained}{speed}",
        )

    def supervised(self, progress: SftProgress) -> None:
        """One step of supervised learning."""
        speed = progress.tokens / progress.seconds
        self.advance(progress.step, f"loss {progress.loss:.4f} · {speed:,.0f} tokens/s")

    def preference(self, progress: RewardProgress) -> None:
        """One step of a reward model."""
        speed = progress.tokens / progress.seconds
        self.advance(
            progress.step,
            f"loss {progress.loss:.4f} · accuracy {progress.accuracy:.2f} · {speed:,.0f} tokens/s",
        )

    def score(self, version: int, scores: Mapping[str, float | None]) -> None:
        """A finished held-out evaluation, by kind."""
        text = ", ".join(
            f"{kind} {value:.3f}" for kind, value in scores.items() if value is not None
        )
        self._scores = f" · held-out {text}"
        self.say(f"held-out at version {version}: {text or 'every rollout failed'}")
