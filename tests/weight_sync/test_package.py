"""Imports of the package stay light, and the example of its README runs."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "weight_sync" / "README.md"
LIGHT = (
    "weight_sync.config, weight_sync.errors, weight_sync.manifest, weight_sync.buckets, "
    "weight_sync.receive.engine, weight_sync.announcements, weight_sync.factory"
)


def test_light_modules_import_without_heavy_dependencies() -> None:
    heavy = "{'torch', 'vllm', 'ray', 'pyarrow', 'transformers'}"
    code = f"import sys, {LIGHT}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_example_of_the_readme_runs(capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "3 {'bias': [1.0, 1.0]}\n"
