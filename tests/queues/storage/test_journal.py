"""The journal: frames come back by their location, and a torn tail costs only itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import JournalError
from queues.storage.journal import Journal, Location, read_group
from tests.property_examples import costly
from tests.queues.conftest import frames


def write(directory, payloads, segment_bytes=10**9):
    journal = Journal(directory, segment_bytes=segment_bytes)
    locations = [journal.append(payload) for payload in payloads]
    journal.close()
    return locations


def test_a_frame_is_length_checksum_payload(tmp_path):
    (location,) = write(tmp_path, [b"abc"])
    assert location == (1, 0, 3, 0x78AF5F94892F3950 >> 1)
    (file,) = tmp_path.iterdir()
    # xxh3_64 of "abc" is 78af5f94892f3950 (reference implementation, xxhsum -H3); half of it.
    expected = bytes.fromhex("03000000") + bytes.fromhex("3c57afca44979ca8")[::-1] + b"abc"
    assert file.read_bytes() == expected


@costly
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=10), st.integers(1, 100))
def test_every_payload_is_read_back_by_its_location(tmp_path_factory, payloads, segment_bytes):
    directory = tmp_path_factory.mktemp("journal")
    locations = write(directory, payloads, segment_bytes)
    assert [read_group(directory, location) for location in locations] == payloads
    sizes = [path.stat().st_size for path in sorted(directory.iterdir())]
    assert all(size >= segment_bytes for size in sizes[:-1])


def test_a_truncated_tail_is_readable_as_a_prefix_at_every_length(tmp_path):
    payloads = [b"first", b"", b"third"]
    locations = write(tmp_path, payloads)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        complete = sum(location.offset + 12 + location.length <= length for location in locations)
        assert [payload for _, payload in frames(tmp_path, 1)] == payloads[:complete]
        for location in locations[complete:]:
            with pytest.raises(JournalError, match=f"byte {location.offset} is truncated, damaged"):
                read_group(tmp_path, location)


@pytest.mark.parametrize("byte", [0, 4, 13], ids=["length", "checksum", "payload"])
def test_a_damaged_frame_is_refused_and_its_neighbour_is_not(tmp_path, byte):
    first, second = write(tmp_path, [b"first", b"second"])
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[first.offset + byte] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(JournalError, match="truncated, damaged or another"):
        read_group(tmp_path, first)
    assert read_group(tmp_path, second) == b"second"


def test_a_journal_opened_again_begins_a_new_segment(tmp_path):
    write(tmp_path, [b"one"])
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    ((segment, offset, *_),) = write(tmp_path, [b"two"])
    assert (segment, offset) == (2, 0)
    assert file.read_bytes() == before


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(JournalError, match=r"00000007\.segment: cannot be read"):
        read_group(tmp_path, Location(7, 0, 1, 1))
    (tmp_path / "notes.segment").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path, segment_bytes=1)


def test_a_segment_in_the_place_of_another_is_refused_where_frames_begin_at_the_same_byte(tmp_path):
    locations = write(tmp_path, [b"one", b"two"], segment_bytes=1)
    one, two = sorted(tmp_path.iterdir())
    one.write_bytes(two.read_bytes())
    with pytest.raises(JournalError, match=r"00000001\.segment: the frame at byte 0 is .* another"):
        read_group(tmp_path, locations[0])
    assert read_group(tmp_path, locations[1]) == b"two"
