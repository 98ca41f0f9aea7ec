"""Lists of cores are read, and a process stays on the cores that it is bound to."""

import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from headway.cpu_cores import Cores, bind_process, parse_cores, usable_cores
from headway.errors import InputError


def test_a_list_of_cores_and_ranges_is_read():
    assert parse_cores("5,0-2,1") == [0, 1, 2, 5]


@pytest.mark.parametrize("text", ["", "a", "1-", "5-2", "0,5-2"])
def test_a_list_that_names_no_cores_is_refused(text):
    with pytest.raises(ValidationError):
        TypeAdapter(Cores).validate_python(text)


def test_a_thread_that_ends_while_a_process_is_bound_is_left_out(monkeypatch):
    available = sorted(os.sched_getaffinity(0))
    gone = "4194304"  # above the largest pid
    threads = [gone, *os.listdir("/proc/self/task")]
    monkeypatch.setattr("headway.cpu_cores.os.listdir", lambda path: threads)
    bind_process(available, "learner.cores")
    assert sorted(os.sched_getaffinity(0)) == available


def test_cores_that_the_machine_lacks_are_refused():
    with pytest.raises(InputError, match=r"learner.cores names \[1023\], but there are only"):
        bind_process([1023], "learner.cores")


def test_a_container_uses_no_more_cores_than_its_limit(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    limit = tmp_path / "cpu.max"
    assert usable_cores(limit) == cores, "there is no limit"
    for quota, count in (("max", None), (50_000, 1), (100_000, 1), (150_000, 1), (200_000, 2)):
        limit.write_text(f"{quota} 100000\n")
        assert usable_cores(limit) == cores[:count]
