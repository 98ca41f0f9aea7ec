"""What happened in each hostile case: a table, for `make red-team`."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.deploy.conftest import headway  # noqa: F401


@pytest.fixture(scope="session")
def outcomes():
    """Collect the outcome of every case that is played: `outcomes[kind, case] = outcome`.

    RED_TEAM_TABLE names a file for the table, with a line for each kind and outcome, and for them
    all as JSON.
    """
    collected = {}
    yield collected
    table = Counter((kind, outcome) for (kind, _), outcome in collected.items())
    lines = [f"{kind:14} {outcome:12} {count}" for (kind, outcome), count in sorted(table.items())]
    lines.append(f"{len(collected)} cases")
    if file := os.environ.get("RED_TEAM_TABLE"):
        rows = {f"{kind}: {case}": outcome for (kind, case), outcome in collected.items()}
        Path(file).write_text("\n".join(lines) + "\n" + json.dumps(rows, indent=1) + "\n")
