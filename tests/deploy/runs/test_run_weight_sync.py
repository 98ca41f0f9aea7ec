"""Whole runs over every transport, and by delta: what they serve, and what they record of it."""

import json
import shutil

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

WARM = "small-sft"


def run(headway, name: str, *settings: str) -> tuple[dict, list[dict]]:
    """Summary and swaps of a run with the scripted engine."""
    runs = headway.folder / "runs"
    shutil.copytree(runs / WARM, runs / f"{name}-sft")
    result = headway.recipe("run", f"name={name}", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    swaps = (runs / name / "swaps.jsonl").read_text().splitlines()
    return json.loads((runs / name / "summary.json").read_text()), [json.loads(s) for s in swaps]


def test_a_run_over_a_shared_folder_sends_small_deltas_in_bfloat16(headway) -> None:
    folder = headway.folder / "weights"
    summary, swaps = run(
        headway,
        "folder",
        "weight_sync.transport=filesystem",
        f"weight_sync.folder={folder}",
        "weight_sync.codec=delta",
        "weight_sync.wire_dtype=bfloat16",
        "steps=6",
        "learner.learning_rate=1e-6",
        "learner.entropy={coefficient=0.1}",  # so that rewards which are all equal teach something
    )
    assert summary["weight_sync"]["failed"] == 0
    first, *others = swaps
    assert (first["codec"], first["seeding"]) == ("full", True)
    deltas = [swap for swap in others if swap["codec"] == "delta"]
    assert deltas
    for swap in deltas:
        print(f"changed {swap['changed']:.4f}, {swap['bytes']} of {swap['full_bytes']} bytes")
        assert 0 < swap["changed"] < 0.5
        assert swap["bytes"] < swap["full_bytes"]
    (newest,) = (entry for entry in folder.iterdir() if entry.is_dir())
    assert newest.name.startswith("00000006-")


def test_a_run_over_the_object_store_ends_like_any_other(headway) -> None:
    summary, swaps = run(headway, "objects", "weight_sync.transport=object_store")
    assert (summary["status"], summary["weight_sync"]["failed"]) == ("done", 0)
    assert {swap["codec"] for swap in swaps} == {"full"}
    assert swaps[-1]["bytes"] == swaps[-1]["full_bytes"] > 0
