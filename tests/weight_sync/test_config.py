"""The section `[weight_sync]` of a recipe."""

import pytest
from pydantic import ValidationError

from weight_sync.config import WeightSyncConfig


def test_defaults_swap_a_quarter_of_the_engines_in_flight() -> None:
    config = WeightSyncConfig()
    assert (config.transport, config.codec) == ("shared_memory", "full")
    assert (config.update_mode, config.update_fraction) == ("in_flight", 0.25)
    assert (config.clear_cache, config.bucket_bytes) == (False, 2**26)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update_fraction", 0),
        ("update_fraction", 1.5),
        ("bucket_bytes", 16),
        ("timeout_seconds", 0),
        ("transport", "carrier_pigeon"),
        ("transport", "filesystem"),
        ("folder", "/shared"),
        ("codec", "zip"),
        ("wire_dtype", "int8"),
        ("update_mode", "never"),
        ("buckets", 3),
    ],
)
def test_what_cannot_work_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        WeightSyncConfig(**{key: value})


def test_a_shared_folder_is_an_absolute_path() -> None:
    with pytest.raises(ValidationError, match="expected an absolute path"):
        WeightSyncConfig(transport="filesystem", folder="weights")
    WeightSyncConfig(transport="filesystem", folder="/shared/weights")
