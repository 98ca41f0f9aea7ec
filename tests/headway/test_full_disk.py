"""A process that is started again waits for space on the disk of its run."""

import subprocess
from unittest.mock import Mock, call

import pytest

from headway import full_disk


@pytest.mark.parametrize("probes", [[True], [False, False, True]], ids=["enough", "full"])
def test_a_full_disk_is_waited_for_and_named(tmp_path, monkeypatch, probes):
    has_space, messages = Mock(side_effect=probes), []
    monkeypatch.setattr(full_disk, "has_space", has_space)
    monkeypatch.setattr(full_disk, "SPACE_SECONDS", 0.0)
    full_disk.wait_for_space(tmp_path, messages.append)
    assert has_space.call_args_list == [call(tmp_path, 2**24)] * len(probes)
    named = [
        f"paused: no space is left on the disk of {tmp_path}; free some, and this goes on by itself"
        " (at 16,777,216 bytes)",
        f"there is space again on the disk of {tmp_path}",
    ]
    assert messages == (named if len(probes) > 1 else [])


def test_a_disk_that_became_read_only_is_told_from_a_full_one(mount_disk):
    disk = mount_disk("1m")
    assert full_disk.why_unwritable(disk) is None
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)
    assert full_disk.why_unwritable(disk) == "Read-only file system"
    assert full_disk.has_space(disk)
