"""The clock of time stamps: steady, shared by the processes of a command, and the only one used."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway import clock

ROOT = Path(__file__).parents[2]
PRODUCT = ("actors", "deploy", "headway", "learner", "queues", "weight_sync")
CLOCK = "headway/clock.py"
WALL = {"time": {"time", "time_ns", "CLOCK_REALTIME"}, "datetime": {"now", "utcnow", "today"},
        "date": {"today"}}  # fmt: skip
"""Attributes that show what the machine's clock shows; `clock_gettime` takes CLOCK_REALTIME."""
BY_THE_WALL = {
    ("deploy/cluster/cleanup.py", "create_time"): "compared with the wall clock's time of a file",
    ("deploy/storage/scaling.py", "time"): "compared with the wall clock's time of a file",
}
"""Other uses of the wall clock, each with the reason why it is none of a duration."""
HOUR = 3600.0


def wall_clocks(path):
    """Yield what reads the wall clock in a source file, with its line."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text if "time" in text or "date" in text else "")):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if node.attr in WALL.get(name, ()) or node.attr == "create_time":
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names = {alias.name for alias in node.names} & WALL["time"]
            yield from ((name, node.lineno) for name in names)


def test_nothing_of_the_product_reads_the_wall_clock_but_the_clock_of_time_stamps():
    uses = {
        f"{file}:{line}": name
        for package in PRODUCT
        for path in sorted((ROOT / package).rglob("*.py"))
        if (file := str(path.relative_to(ROOT))) != CLOCK
        for name, line in wall_clocks(path)
        if (file, name) not in BY_THE_WALL
    }
    assert uses == {}, "take headway.clock.now, or time.monotonic for a duration"


@pytest.mark.parametrize(
    "code",
    [
        "time.time()", "clock = time.time", "time.time_ns()", "from time import time",
        "time.clock_gettime(time.CLOCK_REALTIME)", "datetime.now()", "datetime.datetime.utcnow()",
        "psutil.Process().create_time()",
    ],
)  # fmt: skip
def test_the_rule_sees_every_way_to_read_the_wall_clock(tmp_path, code):
    (tmp_path / "code.py").write_text(code)
    assert len(list(wall_clocks(tmp_path / "code.py"))) == 1


@pytest.mark.parametrize("moved", [-HOUR, HOUR])
def test_a_moved_clock_moves_no_stamp_and_prometheus_gets_the_time_of_its_own(monkeypatch, moved):
    stamp, true = clock.now(), time.time
    assert abs(stamp - time.time()) < 1.0
    monkeypatch.setattr(time, "time", lambda: true() + moved)
    assert 0.0 <= clock.now() - stamp < 60.0
    assert time.time() - clock.wall(stamp) == pytest.approx(0.0, abs=10.0)


def test_a_process_started_after_the_clock_was_moved_shares_its_parents_stamps():
    code = (
        "import time; true = time.time; time.time = lambda: true() - 3600.0;"
        "from headway import clock; print(clock.now(), clock.now() - clock.process_started())"
    )

    def ask(**variables):
        child = [sys.executable, "-c", code]
        shown = subprocess.check_output(child, cwd=ROOT, text=True, env=os.environ | variables)
        return [float(number) for number in shown.split()]

    begin = clock.now()
    shared, age = ask()
    assert begin <= shared <= clock.now()
    assert 0.0 <= age < 60.0, "a process started before now"
    own, _ = ask(**{clock.VARIABLE: "another-boot=5.0"})
    assert own < begin - HOUR / 2
