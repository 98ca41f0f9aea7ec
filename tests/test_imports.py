"""Import direction between packages and between their folders, folder sizes, heavy libraries.

Read from the source, so that an import inside a function counts like one at the top.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "deploy", "headway", "learner", "queues", "weight_sync")
ALLOWED = {
    "headway": set(),
    "queues": {"headway"},
    "weight_sync": {"headway"},
    "actors": {"headway", "queues", "weight_sync"},
    "learner": {"headway", "queues", "weight_sync"},
    "deploy": {"actors", "headway", "learner", "queues", "weight_sync"},
}
HEAVY = {
    "vllm": [
        "actors/engines/vllm*.py",
        "actors/gateway/vllm_app.py",
        "weight_sync/vllm/*.py",
        "weight_sync/direct/vllm_sender.py",
    ],
    "deepspeed": ["learner/engine/deepspeed.py"],
    "peft": ["learner/model/lora.py"],
    "ray": ["ray_*.py", "deploy/*.py", "deploy/*/*.py"],
    "pyarrow": ["queues/schema*.py", "queues/turns.py", "actors/sources/*.py", "deploy/api/*.py"],
    "prometheus_client": [
        "metrics.py",
        "deploy/driver/run_metrics.py",
        "deploy/observability/exporter.py",
        "deploy/observability/top_model.py",
    ],
}
ORDER = {
    "headway": (
        "clock errors file_lock atomic_file clean_text nearest_name recipe_section output_limits "
        "cpu_cores daemon_thread full_disk folder_checksums hang_detection metrics user_code "
        "registry options roles ray_process ray_service"
    ),
    "queues": (
        "errors records policy config state storage segments schema_checks schema turns protocols "
        "readers broker ray_broker"
    ),
    "weight_sync": (
        "errors open_files adapter base_model manifest probe announcements progress "
        "broadcaster buckets config ray_broadcaster transports codecs publish "
        "receive vllm direct factory"
    ),
    "learner": (
        "errors config disk_wait sums advantages losses corrections batch diagnostics "
        "model engine objective update learner metrics ranks supervised"
    ),
    "actors": (
        "errors bounded_http outages foreign_text shipped vllm_options config engines "
        "sandbox environments rewards rollout gateway programs remote reward_models sources "
        "metrics assembly ray_actor ray_reward_model"
    ),
    "deploy": (
        "starter errors runtime config storage observability report planner preflight "
        "cluster driver run session offline api cli"
    ),
    "benchmarks": (
        "harness loop broker weights training rollouts reliability observability gpu __main__"
    ),
}
"""The folders and root modules of each package, lowest first: each imports from those before it."""
MOST_MODULES = 22
"""In one folder."""
LIGHT_COMMANDS = (["--help"], ["validate", "demo"])
LIGHT_MODULES = {
    "actors.config": "torch vllm ray transformers reasoning_gym pyarrow",
    "learner.config.learner learner.errors": "torch ray deepspeed transformers pyarrow vllm",
    "queues.config queues.errors queues.records": "pyarrow ray numpy torch",
    "queues.readers.accounting": "pyarrow ray torch",
    "queues.broker.broker": "ray torch",
    "weight_sync.config weight_sync.errors weight_sync.manifest weight_sync.buckets "
    "weight_sync.receive.engine weight_sync.announcements weight_sync.factory": (
        "torch vllm ray pyarrow transformers"
    ),
}
"""Modules, and the libraries that they do not load."""


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path):
    """Yield the dotted names that a module imports, for types only too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_direction_and_heavy_libraries_stay_in_their_files(path):
    package = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imported(path)}
    assert roots & set(PACKAGES) <= ALLOWED[package] | {package}
    for library, homes in HEAVY.items():
        if library in roots:
            assert any(path.relative_to(ROOT).match(home) for home in homes), library


def inner_modules():
    files = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in files if path.parent.parent != ROOT or path.stem != "__init__"]


@pytest.mark.parametrize("path", inner_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_folders_below_its_own(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    order = ORDER[parts[0]].split()
    assert parts[1] in order, f"{parts[1]} has no place in the order of {parts[0]}"
    below = set(order[: order.index(parts[1]) + 1])
    own = [name.split(".") for name in imported(path) if name.startswith(f"{parts[0]}.")]
    assert {part for _, part, *_ in own} <= below


def test_no_modules_import_each_other_in_a_circle():
    files = [path for package in ORDER for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    inner = {name: path for name, path in names.items() if not name.endswith(".__init__")}
    graph = {name: inner.keys() & set(imported(path)) for name, path in inner.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("package", [*ORDER])
def test_a_folder_holds_few_enough_modules(package):
    for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder


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


@pytest.mark.parametrize(("modules", "absent"), LIGHT_MODULES.items())
def test_a_light_module_loads_no_heavy_library(modules, absent):
    program = (
        f"import sys, {', '.join(modules.split())}; print({{*{absent.split()}}} & {{*sys.modules}})"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert loaded == "set()\n"
