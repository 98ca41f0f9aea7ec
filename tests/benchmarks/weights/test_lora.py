"""Conclusions of `headway bench lora` from raw figures."""

import pytest

from benchmarks.weights.lora import STUDY, LoraOptions, conclude, misses, table
from benchmarks.weights.update_pause import conclude as conclude_pause
from benchmarks.weights.weight_sync import conclude as conclude_sync

FULL = {"publish": 0.1, "prepare": 0.4, "stall": 0.05, "serving": 1.0, "bytes": 1000}
NAME = "shared_memory full float32"


def record(**changes):
    ways = {
        name: {key: [value, value, 9e9] for key, value in figures.items()}
        for name, figures in {
            NAME: FULL | {"tokens_per_second": 100.0},
            "adapter": FULL | {"tokens_per_second": 95.0, "bytes": 12} | changes,
        }.items()
    }
    measured = {"ways": ways, "parameters": 10}
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


def test_updates_are_held_against_the_calls_of_vllm_and_a_copy():
    figures = {**FULL, "bare_load": 0.2, "empty_pause": 0.1}
    measured = {"ways": {NAME: {key: [value] for key, value in figures.items()}}, "memcpy": [0.05]}
    assert conclude_pause(measured)["ratio"] == pytest.approx(0.05 / (0.1 + 2 * 0.2))
    row = conclude_sync(measured)["medians"]["ways"][NAME]
    assert row["publish_per_memcpy"] == pytest.approx(2.0)
    assert row["stall_per_load"] == pytest.approx(0.25)
    assert row["serving_per_load_and_4_memcpy"] == pytest.approx(1.0 / 0.4)


def test_records_are_named_by_their_time():
    options = LoraOptions()
    assert STUDY.record_file(options, options).name.startswith("lora_")
