"""A taskset of the library verifiers, with its own harness and reward, is learned as the page says.

It needs an environment with the library: `make test-agents`.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.conftest import Headway
from tests.test_pages import blocks_of

ROOT = Path(__file__).parents[3]
VERIFIERS = ROOT / ".verifiers" / "bin" / "python"
STEPS = 16

pytestmark = [
    pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed"),
]  # fmt: skip


def lines_of_the_page():
    """Return what the page says of a recipe for a taskset, as settings of a command."""
    [block] = [x for x in blocks_of("actors/docs/environments.md") if "verifiers:products" in x]
    section, settings = "", []
    for line in block.replace(".venv-verifiers/bin/python", str(VERIFIERS)).splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif line:
            settings.append(f"{section}.{line.replace(' = ', '=', 1)}")
    return settings


def test_a_taskset_of_verifiers_is_learned_with_its_own_harness_and_reward(tmp_path):
    headway = Headway(tmp_path)
    for name in ("agent.toml", "products.py"):
        shutil.copy(ROOT / "examples" / "agent" / name, tmp_path)
    settings = [f"steps={STEPS}", f"heldout.every={STEPS // 2}", *lines_of_the_page()]
    changes = [x for one in settings for x in ("--set", one)]
    for command in ("sft", "run"):
        done = headway(command, "agent.toml", *changes, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((headway.run_folder("agent") / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", STEPS)
    assert summary["accounting"]["balanced"]
    greedy, sampled = (
        [row["score"] for row in summary[key]] for key in ("heldout", "heldout_sampled")
    )
    agents = summary["agents"]
    print(json.dumps({
        "greedy": greedy, "sampled": sampled, "seconds": summary["seconds"],
        "first": summary["seconds_to_first_step"], "agents": agents,
    }))  # fmt: skip
    assert greedy[0] <= 0.1
    assert sampled[0] <= 0.3
    assert greedy[-1] >= 0.9
    assert sampled[-1] >= sampled[0] + 0.1
    # The taskset appends to its history, and the library's proxy changes nothing in it.
    assert (agents["segments"], sum(agents["left_out"].values())) == (0, 0)
    rows = [row for row in headway.rollouts("agent") if row["state"] == "trained"]
    assert len(rows) == STEPS * 64
    assert {row["turns"] for row in rows} <= {1, 2, 3, 4}
