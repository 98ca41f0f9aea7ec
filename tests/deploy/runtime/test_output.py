"""Output that cannot be written ends nothing, and what can be written arrives."""

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from deploy.runtime.console import Terminal
from deploy.runtime.output import WAITING, tolerant


def speak(stream, lines=3):
    """Print lines and progress as a run does."""
    from rich.console import Console

    terminal = Terminal(Console(file=tolerant(stream), highlight=False))
    for number in range(lines):
        terminal.say(f"line {number} · ready")
    with terminal.bar(2, "waiting"):
        terminal.advance(1, "reward 0.5 · lag 1")
    terminal.say("the end")


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def full_disk():
    return open("/dev/full", "w")


def closed_descriptor():
    stream = full_disk()
    os.close(stream.fileno())
    return stream


def lost_terminal():
    master, terminal = pty.openpty()
    os.close(master)
    return os.fdopen(terminal, "w")


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream", [closed_pipe, full_disk, lost_terminal, closed_stream], ids=lambda make: make.__name__
)
def test_what_cannot_be_written_is_dropped(stream):
    opened = stream()
    speak(opened)
    if stream is full_disk:
        opened.detach().detach().close()  # without the flush that fails


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_an_encoding_lacks_are_replaced(tmp_path, encoding):
    file = tmp_path / "printed"
    with file.open("w", encoding=encoding) as stream:
        speak(stream, 1)
        tolerant(stream).write("\ud800 ✓\n")
    text = file.read_text(encoding=encoding)
    assert "the end\n" in text
    assert text.endswith("? ?\n")


def test_text_arrives_in_order_also_through_a_stream_without_a_descriptor():
    printed = io.StringIO()
    speak(printed)
    lines = [line.partition(" s  ")[2] for line in printed.getvalue().splitlines()]
    assert lines == [
        "line 0 · ready", "line 1 · ready", "line 2 · ready", "step 1/2 · reward 0.5 · lag 1",
        "the end",
    ]  # fmt: skip


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stops_reading_holds_up_nothing_and_gets_the_rest_when_it_goes_on(blocking):
    read, write = os.pipe()
    os.set_blocking(write, blocking)
    output = tolerant(os.fdopen(write, "w"))
    began = time.monotonic()
    texts = [f"{number:08}\n" * 8192 for number in range(5)]  # of 72 KiB; a pipe holds 64
    for text in texts:
        output.write(text)
    assert time.monotonic() - began < 30
    received = b""
    while len(received) < sum(map(len, texts)):
        received += os.read(read, 1 << 20)
    assert received.decode() == "".join(texts)
    for number in range(2 * WAITING):
        output.write(f"{number}\n" * 100)
    os.close(read)


def test_a_closed_standard_stream_is_not_taken_by_another_file():
    program = (
        "import os, sys\n"
        "from deploy.runtime.output import open_standard_streams\n"
        "open_standard_streams()\n"
        "os.write(int(sys.argv[1]), str(os.open('/dev/null', 0)).encode())\n"
        "print('to nobody', '\\ud800')\n"
    )
    read, write = os.pipe()
    command = [sys.executable, "-c", program, str(write)]
    shell = ["sh", "-c", 'exec "$0" "$@" <&- >&-', *command]
    done = subprocess.run(shell, pass_fds=[write], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(os.read(read, 9)) > 2
