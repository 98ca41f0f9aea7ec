"""What importing the package costs."""

import subprocess
import sys

import pytest


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
