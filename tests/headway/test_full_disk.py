"""A process that is started again waits for space on the disk of its run."""

import pytest

from headway import full_disk


@pytest.mark.parametrize(
    ("probes", "said"),
    [
        ([True], []),
        (
            [False, False, True],
            [
                "paused: no space is left on the disk of {folder}; free some, and this goes on by "
                "itself (at 16,777,216 bytes)",
                "there is space again on the disk of {folder}",
            ],
        ),
    ],
    ids=["enough", "full"],
)
def test_a_full_disk_is_waited_for_and_named(tmp_path, monkeypatch, probes, said):
    asked, heard = [], []

    def has_space(folder, size):
        asked.append((folder, size))
        return probes[len(asked) - 1]

    monkeypatch.setattr(full_disk, "has_space", has_space)
    monkeypatch.setattr(full_disk, "SPACE_SECONDS", 0.0)
    full_disk.wait_for_space(tmp_path, heard.append)
    assert heard == [line.format(folder=tmp_path) for line in said]
    assert asked == [(tmp_path, 2**24)] * len(probes)
