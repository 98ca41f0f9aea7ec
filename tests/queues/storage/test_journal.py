"""The journal: frames come back by their location, and a torn tail costs only itself."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import JournalError
from queues.storage.journal import Journal, read_group
from tests.queues.conftest import frames


def write(directory: Path, payloads: list[bytes], segment_bytes: int = 10**9) -> list[tuple]:
    journal = Journal(directory, segment_bytes=segment_bytes)
    places = [journal.append(payload) for payload in payloads]
    journal.close()
    return places


def test_a_frame_is_length_checksum_payload(tmp_path: Path) -> None:
    (place,) = write(tmp_path, [b"abc"])
    assert place == (1, 0, 3)
    (file,) = tmp_path.iterdir()
    # xxh3_64 of "abc" is 78af5f94892f3950 (reference implementation, xxhsum -H3).
    expected = bytes.fromhex("03000000") + bytes.fromhex("78af5f94892f3950")[::-1] + b"abc"
    assert file.read_bytes() == expected


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=10), st.integers(1, 100))
def test_every_payload_is_read_back_by_its_location(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], segment_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    places = write(directory, payloads, segment_bytes)
    assert [read_group(directory, place[0], place[1]) for place in places] == payloads
    sizes = [path.stat().st_size for path in sorted(directory.iterdir())]
    assert all(size >= segment_bytes for size in sizes[:-1])


def test_a_truncated_tail_is_readable_as_a_prefix_at_every_length(tmp_path: Path) -> None:
    payloads = [b"first", b"", b"third"]
    places = write(tmp_path, payloads)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        complete = sum(place[1] + 12 + place[2] <= length for place in places)
        assert [payload for _, payload in frames(tmp_path, 1)] == payloads[:complete]
        for place in places[complete:]:
            with pytest.raises(JournalError, match=f"byte {place[1]} is truncated or damaged"):
                read_group(tmp_path, place[0], place[1])


def test_a_damaged_frame_is_refused_and_its_neighbour_is_not(tmp_path: Path) -> None:
    first, second = write(tmp_path, [b"first", b"second"])
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[first[1] + 13] ^= 1
    file.write_bytes(content)
    with pytest.raises(JournalError, match="truncated or damaged"):
        read_group(tmp_path, *first[:2])
    assert read_group(tmp_path, *second[:2]) == b"second"


def test_a_journal_opened_again_begins_a_new_segment(tmp_path: Path) -> None:
    write(tmp_path, [b"one"])
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    ((segment, offset, _),) = write(tmp_path, [b"two"])
    assert (segment, offset) == (2, 0)
    assert file.read_bytes() == before


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"00000007\.segment: cannot be read"):
        read_group(tmp_path, 7, 0)
    (tmp_path / "notes.segment").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path, segment_bytes=1)
