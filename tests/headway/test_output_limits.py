"""Limits of what is printed: rates, and sizes of log files."""

import io
import os
import subprocess
import sys

import pytest

from headway import output_limits
from headway.clean_text import forget
from headway.output_limits import (
    HEAD_BYTES,
    LIMIT_BYTES,
    LOG_BYTES,
    TAIL_BYTES,
    LimitedStream,
    LogFile,
    RateLimit,
    limited_output,
)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # kept open until the end


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "tok-12345")
    forget()
    yield "tok-12345"
    forget()


def test_output_beyond_the_limit_is_counted_and_said_later(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(output_limits.time, "monotonic", lambda: clock[0])
    limit = RateLimit("rewards")
    assert limit.allow(10) == (10, "")
    assert limit.allow(LIMIT_BYTES) == (LIMIT_BYTES - 10, "")
    assert limit.allow(5) == (0, "")
    clock[0] = 61.0
    assert limit.allow(7) == (7, "[15 bytes that rewards printed are left out]\n")
    clock[0] = 200.0
    assert limit.allow(1) == (1, "")


def test_what_is_printed_in_a_block_is_limited_and_has_no_secret(secret, monkeypatch):
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    with limited_output("sources"):
        print("first", secret)
        sys.stderr.writelines(["second\n"])
        for _ in range(3):
            print("x" * LIMIT_BYTES)
        sys.stdout.flush()
    print("after", secret)
    assert output.getvalue().startswith("first [SOME_TOKEN]\nx")
    assert output.getvalue().endswith(f"after {secret}\n")
    assert len(output.getvalue()) < LIMIT_BYTES + 100
    assert errors.getvalue() == "second\n"


def test_a_limited_stream_is_the_stream_in_all_else():
    limited = LimitedStream(io.StringIO(), RateLimit("x"))
    assert (limited.write("abc"), limited.isatty(), limited.getvalue()) == (3, False, "abc")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "worker.err"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield path, lambda data: os.write(descriptor, data), LogFile(str(path))
    os.close(descriptor)


def test_a_long_log_keeps_its_beginning_and_its_end(log):
    path, append, file = log
    append(b":actor_name:actor-0\n" + b"h" * HEAD_BYTES)
    for _ in range(LOG_BYTES // TAIL_BYTES + 1):
        append(b"x" * TAIL_BYTES)
    append(b"end\n")
    file.look()
    content = path.read_bytes()
    assert content.startswith(b":actor_name:actor-0\nh")
    assert content.endswith(b"xend\n")
    assert b"bytes are left out: the log was longer than" in content
    assert len(content) < HEAD_BYTES + TAIL_BYTES + 200
    append(b"more\n")
    file.look()
    assert path.read_bytes() == content + b"more\n"


def test_secrets_are_hidden_in_a_log_wherever_they_are_written(log, secret):
    path, append, file = log
    for number in range(40):
        append(f"line {number}: key {secret} is a key\n".encode() * 997)
        append(secret[:4].encode())
        file.look()
        append(secret[4:].encode() + b"\xff\n")
    file.look()
    content = path.read_bytes()
    assert secret.encode() not in content
    assert content.count(b"\n") == 40 * 998
    assert b"line 7: key [SOME_TOKEN] is" in content


def test_a_log_that_somebody_else_cuts_is_followed(log, secret):
    path, append, file = log
    append(b"x" * 100_000)
    file.look()
    os.truncate(path, 10)
    file.look()
    append(f"{secret} {'y' * 200_000}\n".encode())
    file.look()
    file.look()
    assert path.stat().st_size > 200_000


PROGRAM = """
import os, pathlib, sys, threading, time
from headway import output_limits
output_limits.LOOK_SECONDS = 0.01
output_limits.keep_logs_small()
log, secret = pathlib.Path(sys.argv[1]), os.environ["SOME_TOKEN"]
for _ in range(24):
    os.write(1, b"x" * 2**20)
    print(secret, flush=True)
followed = any(thread.name == "log-limit" for thread in threading.enumerate())
while followed and (log.stat().st_size > 2**24 or secret in log.read_text()):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_files_that_a_process_appends_to_are_kept_small_and_others_left_alone(
    tmp_path, secret, mode
):
    path = tmp_path / "log"
    with path.open(mode) as file:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path)], stdout=file, check=True, timeout=60
        )
    assert (path.stat().st_size <= LOG_BYTES) == (mode == "ab")
    assert (secret.encode() not in path.read_bytes()) == (mode == "ab")
