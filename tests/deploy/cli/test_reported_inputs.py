"""Inputs that other systems were reported to fail with, as whole runs from the command line."""

import json
import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]

FILES = [
    "prompts.source=files", "prompts.source_options.path=ten.jsonl", "heldout.size=1",
    "heldout.final_size=1", "heldout.every=100",
]  # fmt: skip


@pytest.fixture
def ten_prompts(headway):
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(10)]
    (headway.folder / "ten.jsonl").write_text("\n".join(lines))
    return headway


@pytest.mark.reported("done_with_zero_steps")
@pytest.mark.parametrize("mended", [0, 2])
def test_a_run_whose_prompts_all_fail_has_failed_and_goes_on_when_they_are_put_back(
    ten_prompts, mended
):
    """From the first step on, or from the third."""
    headway, name = ten_prompts, f"broken{mended}"
    (headway.folder / "broken.py").write_text(
        "import os\n"
        "def score(prompt, completion, answer, metadata):\n"
        "    if os.path.exists('mended') or int(answer) <= 2 * {mended}:\n"
        "        return len(completion) % 3\n"
        "    raise KeyError('lost')\n".replace("{mended}", str(mended))
    )
    settings = ["steps=6", 'actors.reward=["broken:score"]', 'actors.heldout_reward=["tags"]']
    settings += ["queues.retry_seconds=0.1", "prompts.pass_rate_cap=1.0"]
    settings += ["prompts.pass_threshold=0.0"] if mended else ["prompts.pass_threshold=9.0"]
    failed = headway.recipe("run", f"name={name}", *FILES, *settings)
    assert failed.returncode == 1
    assert "of 6 steps are trained, and no prompt is left to train on" in failed.stderr
    assert "reward 'broken:score' of prompt 'ten/" in failed.stderr
    assert "KeyError('lost')" in failed.stderr
    folder = headway.run_folder(name)
    assert f"headway requeue {folder}, then headway resume {folder}" in failed.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert (summary["version"] > 0) == (mended > 0)
    (headway.folder / "mended").touch()
    try:
        assert headway("requeue", name).returncode == 0
        resumed = headway("resume", name)
    finally:
        (headway.folder / "mended").unlink()
    done = json.loads((folder / "summary.json").read_text())
    assert done["version"] > summary["version"], resumed.stderr
    if not mended:
        assert (resumed.returncode, done["status"], done["version"]) == (0, "done", 6)


@pytest.mark.reported("transient_outage")
def test_a_judge_that_is_away_for_a_while_delays_a_run(ten_prompts):
    headway = ten_prompts
    (headway.folder / "flaky.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, answer, metadata):\n"
        "    if not os.path.exists('away'): open('away', 'w').write(str(time.time()))\n"
        "    if time.time() - float(open('away').read() or 0) < 12:\n"
        "        raise ConnectionError('judge at http://judge:8000 does not answer')\n"
        "    return float(len(completion) % 3)\n"
    )
    run = headway.finish("flaky", "steps=20", *FILES, 'actors.reward=["flaky:score"]')
    assert run.summary["version"] == 20
    assert run.summary["accounting"]["failed"] == {}
    said = "paused: actor-0: reward 'flaky:score' waits since "
    [line] = [line for line in run.output.splitlines() if said in line]
    assert "judge at http://judge:8000 does not answer" in line
    assert headway.accounting("flaky")["failed_prompts"] == []


def test_a_judge_that_stays_away_ends_a_run_with_its_name(ten_prompts):
    headway = ten_prompts
    (headway.folder / "absent.py").write_text(
        "import urllib.request\n"
        "def score(prompt, completion, answer, metadata):\n"
        "    urllib.request.urlopen('http://127.0.0.1:9/v1')\n"
    )
    settings = ['actors.reward=["absent:score"]', "actors.outage_seconds=4"]
    failed = headway.recipe("run", "name=absent", *FILES, *settings)
    assert failed.returncode == 1
    waited = r"reward 'absent:score' has waited \d+ s \(actors.outage_seconds = 4\)"
    assert re.search(waited, failed.stderr)
    assert "Connection refused" in failed.stderr
    assert (
        json.loads((headway.run_folder("absent") / "summary.json").read_text())["status"]
        == "failed"
    )
