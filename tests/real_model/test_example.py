"""The example smollm2 learns from the score that its README names, in a shortened run."""

import shutil

import pytest

from tests.deploy.conftest import FinishedRun, Headway
from tests.real_model.conftest import MODEL

pytestmark = [
    pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed,
    pytest.mark.timeout(1800),
]  # fmt: skip


def test_a_shortened_run_of_the_example_learns(model, tmp_path):
    here = tmp_path / "smollm2"
    shutil.copytree(model.parent, here, ignore=shutil.ignore_patterns("runs", "model"))
    (here / "model").symlink_to(MODEL)
    settings = ("steps=10", "heldout.size=100", "heldout.final_size=100")
    given = [part for setting in settings for part in ("--set", setting)]
    result = Headway(here)("run", "smollm2.toml", *given, timeout=1700)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = FinishedRun(here / "runs" / "smollm2", result.stdout).summary
    first, *_, last = (record["score"] for record in summary["heldout_sampled"])
    assert 0.2 <= first <= 0.6
    assert last >= first + 0.1
    assert summary["max_lag_trained"] <= summary["max_staleness"] == 2
    assert summary["accounting"]["balanced"]
