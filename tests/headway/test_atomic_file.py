"""A file is replaced whole or stays as it was."""

import itertools
import threading
import time

import pytest

from headway.atomic_file import atomic_file


@pytest.fixture
def path(tmp_path):
    """Return a file with old content, which is alone in its folder at the end as well."""
    path = tmp_path / "report.html"
    path.write_bytes(b"old")
    yield path
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_at_the_end_of_the_block(path, durable):
    with atomic_file(path, durable=durable) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_block_that_raises_leaves_the_file_as_it_was(path):
    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_bytes() == b"old"


def test_two_writers_take_turns_and_each_content_is_whole(path):
    path.with_name(".report.html.partial").write_bytes(b"of a process that was killed")
    begun, seen = threading.Event(), []

    def second():
        begun.set()
        with atomic_file(path) as file:
            seen.append(path.read_bytes())
            file.write(b"two")

    with atomic_file(path) as file:
        file.write(b"the")
        other = threading.Thread(target=second)
        other.start()
        begun.wait()
        file.write(b" first")
    other.join(60)
    assert seen == [b"the first"]
    assert path.read_bytes() == b"two"


def test_one_that_another_keeps_writing_is_named(path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(step=1000).__next__)
    with (
        atomic_file(path),
        pytest.raises(BlockingIOError, match=r"another process is writing it: '.*report.html'"),
        atomic_file(path),
    ):
        pass
