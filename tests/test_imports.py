"""Who may import whom: the direction between packages, and where heavy libraries stay.

Read from the source, so that an import inside a function counts like one at the top.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "deploy", "learner", "queues", "weight_sync")
ALLOWED = {
    "queues": set(),
    "weight_sync": set(),
    "actors": {"queues", "weight_sync"},
    "learner": {"queues", "weight_sync"},
    "deploy": {"actors", "learner", "queues", "weight_sync"},
}
HEAVY = {
    "vllm": [
        "actors/engines/vllm.py",
        "weight_sync/vllm/*.py",
        "weight_sync/direct/vllm_sender.py",
    ],
    "deepspeed": ["learner/engine/deepspeed.py"],
    "ray": ["ray_*.py", "deploy/*.py", "deploy/*/*.py"],
    "pyarrow": ["queues/schema.py", "queues/storage/journal.py", "actors/sources/*.py"],
    "prometheus_client": [
        "metrics.py",
        "deploy/driver/run_metrics.py",
        "deploy/observability/exporter.py",
        "deploy/observability/prometheus_text.py",
    ],
}
LIGHT_COMMANDS = (["--help"], ["validate", "demo"])


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported_roots(path):
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_direction_and_heavy_libraries_stay_in_their_files(path):
    package = path.relative_to(ROOT).parts[0]
    roots = imported_roots(path)
    assert roots & set(PACKAGES) <= ALLOWED[package] | {package}
    for library, homes in HEAVY.items():
        if library in roots:
            assert any(path.relative_to(ROOT).match(home) for home in homes), library


@pytest.mark.parametrize("command", LIGHT_COMMANDS, ids=" ".join)
def test_light_commands_load_no_heavy_library(command):
    program = (
        "import sys; sys.argv = ['headway', *sys.argv[1:]]\n"
        "from deploy.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = ['torch', 'vllm', 'ray', 'deepspeed', 'transformers', 'pyarrow']\n"
        "assert not set(heavy) & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
