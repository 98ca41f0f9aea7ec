"""`headway sft` on two ranks: the warm start of one rank, and on again after an interruption."""

import signal

import pytest

from tests.deploy.conftest import Headway, read_rows
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]

SETTINGS = (
    "sft.steps=24", "sft.learning_rate=1e-4", "sft.epsilon=1e-3", "sft.zero_stage=3",
    "sft.heldout=8", "sft.eval_every=8", "sft.checkpoint_every=4",
)  # fmt: skip


def test_two_ranks_learn_what_one_does_and_go_on_after_an_interruption(tmp_path):
    headway = Headway(tmp_path)
    alone = headway.recipe("sft", *SETTINGS)
    assert alone.returncode == 0, alone.stderr
    expected = read_rows(tmp_path / "runs/small-sft/model/losses.jsonl")
    assert [row["step"] for row in expected if row["heldout_loss"]] == [8, 16, 24]

    together = (*SETTINGS, "sft.name=pair", "sft.ranks=2")
    process, folder = headway.start("sft", *together), tmp_path / "runs/pair-sft"
    until((folder / "unfinished/v000004/state.json").exists, 200, process=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "goes on from the newest checkpoint" in output
    again = headway.recipe("sft", *together)
    assert again.returncode == 0, again.stderr
    assert "24 steps, from step " in again.stdout
    found = read_rows(folder / "model/losses.jsonl")
    assert [path.name for path in folder.iterdir()] == ["model"]
    for key in ("step", "tokens", "loss", "heldout_loss"):
        values, wanted = ([row[key] or 0 for row in rows] for rows in (found, expected))
        assert values == pytest.approx(wanted, rel=1e-5), key
