"""`headway inspect`: accounts and failed prompts of a run that is alive, finished or killed."""

import asyncio
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from queues.readers import open_run
from tests.queues.conftest import answer, make_broker, make_prompts

ERROR = "RewardError: [red] is no number"


def headway(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("state", ["live", "finished", "killed"])
def test_accounts_failed_prompts_and_rollouts_are_shown_of_a_run(
    tmp_path: Path, state: str
) -> None:
    run, parquet = tmp_path / "run", tmp_path / "rollouts.parquet"
    run.mkdir()
    (run / "recipe.toml").write_text("")

    def look(folder: Path) -> None:
        accounts = json.loads(headway("inspect", folder, "--json"))
        assert (accounts["issued"], accounts["ready"], accounts["balanced"]) == (4, 2, True)
        assert (accounts["failed"], accounts["heldout_failed"]) == ({"reward": 1}, {"reward": 1})
        assert accounts["failed_prompts"] == [
            {
                "prompt_id": "sums/0/2", "group_id": "g00000003", "purpose": "train",
                "attempts": 1, "reason": "reward", "error": ERROR,
            },
            {
                "prompt_id": "sums/0/0", "group_id": "e00000005", "purpose": "evaluate",
                "attempts": 1, "reason": "reward", "error": ERROR,
            },
        ]  # fmt: skip
        shown = headway("inspect", folder)
        for word in ("failed: reward", "heldout_failed: reward", "sums/0/2", ERROR):
            assert word in shown
        assert "4 rollouts in" in headway("inspect", folder, "--parquet", parquet)
        assert set(pq.read_table(parquet).column("group_id").to_pylist()) == {
            "g00000001", "g00000002"
        }  # fmt: skip

    async def main() -> None:
        broker = make_broker(run, max_attempts=1)
        await broker.issue(make_prompts(4), cursor="4")
        await broker.serving("a", 0)
        first, second, third, _ = await broker.lease("a", 8, 0.0)
        await broker.put("a", answer(first))
        await broker.put("a", answer(second))
        await broker.fail("a", third.group_id, third.attempt, reason="reward", error=ERROR)
        await broker.evaluate("greedy@0", make_prompts(1), temperature=0.0, min_version=0)
        (heldout,) = await broker.lease("a", 1, 0.0)
        await broker.fail("a", heldout.group_id, 1, reason="reward", error=ERROR)
        if state == "live":
            await asyncio.to_thread(look, run)
        elif state == "killed":
            look(Path(shutil.copytree(run, tmp_path / "copy")))
        await broker.close()
        if state == "finished":
            look(run)

    asyncio.run(main())


def test_a_ledger_is_opened_and_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        broker = make_broker(tmp_path)
        await broker.issue(make_prompts(1), cursor="1")
        await broker.close()

    asyncio.run(main())
    (tmp_path / "recipe.toml").write_text("")
    checked: list[Path] = []
    monkeypatch.setattr(open_run, "check", lambda _, path: checked.append(path))
    assert json.loads(headway("inspect", tmp_path, "--json"))["queued"] == 1
    assert checked == [tmp_path / "ledger.sqlite"]
