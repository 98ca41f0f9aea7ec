"""What importing the package costs, and what it exports."""

import subprocess
import sys

import pytest

import weight_sync


@pytest.mark.parametrize(
    "module",
    ["weight_sync", "weight_sync.config", "weight_sync.errors", "weight_sync.manifest",
     "weight_sync.buckets", "weight_sync.receive.engine", "weight_sync.announcements"],
)  # fmt: skip
def test_light_modules_import_without_heavy_dependencies(module: str) -> None:
    heavy = "{'torch', 'vllm', 'ray', 'pyarrow', 'transformers'}"
    code = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_exported_names_are_sorted_and_all_resolve() -> None:
    assert weight_sync.__all__ == sorted(weight_sync.__all__)
    assert weight_sync.__all__ == [
        "Announcements",
        "Broadcaster",
        "BroadcasterClient",
        "Manifest",
        "Publisher",
        "Receiver",
        "SharedMemoryTransport",
        "StagedWeights",
        "SwapReport",
        "Transport",
        "UpdatableEngine",
        "WeightSyncConfig",
        "WeightSyncError",
        "create_broadcaster",
    ]
    for name in weight_sync.__all__:
        assert getattr(weight_sync, name).__module__.startswith("weight_sync")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Broadcast'"):
        weight_sync.Broadcast  # noqa: B018
