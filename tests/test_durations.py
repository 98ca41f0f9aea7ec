"""The recorded durations of tests, by which workers begin with the longest files, are not stale."""

import re
from pathlib import Path

from tests.conftest import is_test, read_durations

ROOT = Path(__file__).parents[1]
UNRECORDED = 0.1
"""Most files without a duration, of all: some of slow tests alone, and those that are new."""
AGAIN = "record them with `make test OPTIONS=--record-durations`"


def test_nearly_every_file_of_tests_has_a_duration():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    recorded = {name.partition("::")[0] for name in read_durations()}
    assert len(files - recorded) <= UNRECORDED * len(files), AGAIN


def test_every_duration_is_of_a_test_that_exists():
    stale = [name for name in read_durations() if not is_test(ROOT, name)]
    assert stale == [], AGAIN


def test_a_test_is_known_by_its_function_whatever_its_parameters():
    own = "tests/test_durations.py"
    name = re.sub(r"\W", "_", "a test is known by its function whatever its parameters")
    assert is_test(ROOT, own)
    assert is_test(ROOT, f"{own}::test_{name}[a::b]")
    assert not is_test(ROOT, f"{own}::test_nothing")
    assert not is_test(ROOT, "tests/test_nothing.py")
