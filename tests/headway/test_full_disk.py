"""A process that is started again waits for space on the disk of its run."""

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
