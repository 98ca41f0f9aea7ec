"""`headway bench async` from end to end, with the scripted engine."""

import json
import re

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timeout(560)]


def test_every_variant_is_compared_with_the_limit_measured_in_the_same_run(headway):
    recipe = headway.arguments("run")[2]
    out = headway.folder / "bench"
    settings = ("--set", 'actors.reward=["varied:score"]')
    options = ("--steps", "8", "--rounds", "1", "--bounds", "0,2", "--out", out)
    result = headway("bench", "async", recipe, *settings, *options, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((out / "async_gain.json").read_text())
    arms = {arm["name"]: arm for arm in document["arms"]}
    (limits,) = document["limits"]
    assert set(arms) == {"0", "2", "0, all cores"}
    assert limits["samples_per_second"] == min(
        limits["actors"]["samples_per_second"], limits["learner"]["samples_per_second"]
    )
    for name, arm in arms.items():
        assert arm["ratio_to_limit"] == arm["samples_per_second"] / limits["samples_per_second"]
        assert arm["lag_max"] <= (2 if name == "2" else 0)
        assert len(arm["raw"]["step_finished_at"]) == 8
    # The replayed learner trained the very batches of the reference arm.
    assert limits["learner"]["raw"]["tokens_trained"] == arms["2"]["raw"]["tokens_trained"]
    assert document["commit"] is None or len(document["commit"]) == 40
    assert (out / "async_gain.png").read_bytes().startswith(b"\x89PNG")
    assert "mean lag of trained tokens" in (out / "async_gain.svg").read_text()
    assert "1/5  round 1/1 · η = 0 · time left: known after the first step" in result.stdout
    assert re.search(r"step \d/8 · round 1/1 · .* · about \d+ (s|min) left", result.stdout)
    assert "limit" in result.stdout
