"""Conclusions of `headway bench lora` from raw figures."""

import pytest

from benchmarks.weights.lora import STUDY, conclude, misses, table

FULL = {"publish": 0.1, "prepare": 0.4, "stall": 0.05, "serving": 1.0, "bytes": 1000}


def record(**changes):
    raw = {
        name: {key: [value, value, 9e9] for key, value in figures.items()}
        for name, figures in {
            "full": FULL | {"tokens_per_second": 100.0},
            "adapter": FULL | {"tokens_per_second": 95.0, "bytes": 12} | changes,
        }.items()
    }
    measured = {"raw": raw, "parameters": 10, "arguments": {"rank": 8}}
    return measured | conclude(measured)


def test_an_adapter_that_meets_every_aim_is_shown_as_ratios():
    met = record(serving=0.5)
    assert met["ratios"]["serving"] == pytest.approx(0.5)
    assert not misses(met)
    assert "adapter / full" in table(met)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": 30}, "bytes 0.030 of full weights', at most 0.02"),
        ({"stall": 0.06}, "stall 1.200 of"),
        ({"serving": 2.0}, "serving 2.000 of"),
        ({"tokens_per_second": 80.0}, "0.800 of the tokens/s, at least 0.9"),
    ],
)
def test_what_is_missed_is_named(changes, message):
    [missed] = misses(record(**changes))
    assert missed.startswith(message)


def test_a_model_without_figures_has_no_conclusions():
    assert conclude({"parameters": 10}) == {}
    assert STUDY.record_file(STUDY.parse([])).name.startswith("lora_")
