"""The second barrier: if a verifier executes a completion after all, nothing comes of it."""

import asyncio
import os
import time

import pytest

from actors.errors import RewardFailed
from actors.rewards.pool import RewardPool

ATTACKS = {
    "a shell": "__import__('os').system('touch {mark}') == 0",
    "a file to write": "open({mark!r}, 'w') and 1",
    "a file to read": "len(open('/etc/passwd').read())",
    "a file by its descriptor": "__import__('os').open('/', 0) and 1",
    "its environment": "'RED_TEAM_SECRET' in __import__('os').environ",
    "environments of others": "len(open('/proc/%d/environ' % __import__('os').getppid()).read())",
    "a process": "__import__('os').fork() + 1",
    "a thread": "__import__('_thread').start_new_thread(print, ()) and 1",
    "another program": "__import__('os').execv('/bin/true', ['true'])",
    "a socket": "__import__('_socket').socket().fileno() + 1",
    "a signal to the parent": "__import__('os').kill(__import__('os').getppid(), 0) or 1",
    "a signal to all": "__import__('os').kill(-1, 0) or 1",
    "a pipe": "len(__import__('os').pipe())",
    "descriptors of the parent": "__import__('os').read(0, 1) or __import__('os').fstat(5).st_mode",
    "sleep": "__import__('time').sleep(3600) or 1",
    "more memory": "len(bytearray(1 << 32))",
    "less of a limit": (
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_DATA, (-1, -1)) or 1"
    ),
    "a segment of memory": "__import__('ctypes').string_at(0)",
    "its own end": "__import__('os')._exit(0)",
    "system exit": "exit()",
    "a broken answer": "__import__('os').write(4, b'[' * 70000) * 0 + 1 / 0",
    "no end": "[0 for _ in iter(int, 1)]",
    "a long integer": "len(str(9 ** 9 ** 9))",
}


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("RED_TEAM_SECRET", "s3cret")
    pool = RewardPool(processes=2, memory_gib=0.5, verifier_seconds=0.5)
    yield pool
    pool.close()


def verify(pool, name, *texts, timeout=20.0):
    """Return the scores of texts by one of `hostile_verifiers`, called one after the other."""

    async def scores():
        for text in texts:
            reward = (f"hostile_verifiers:{name}", {})
            parts = await pool.verify(reward, ["?", text, "7", {}], timeout=timeout)
            yield sum(parts.values())

    async def gather():
        return [score async for score in scores()]

    return asyncio.run(gather())


def test_an_executed_text_gets_nothing_that_is_not_its_own(pool, tmp_path):
    mark = str(tmp_path / "mark")
    for name, text in ATTACKS.items():
        [score] = verify(pool, "evaluates", text.replace("{mark}", mark).replace(
            "{mark!r}", repr(mark)))  # fmt: skip
        assert score == 0.0, name
        assert not os.path.exists(mark), name
    assert verify(pool, "evaluates", "1") == [1.0]


def test_what_a_text_changes_ends_with_its_call(pool):
    rewrite = "STATE['right'] = 100.0"
    assert verify(pool, "executes", rewrite, "pass") == [100.0, 1.0]
    assert verify(pool, "compares", "right", "wrong") == [1.0, 0.0]


def test_a_limit_of_time_or_memory_scores_0_and_its_log_line_says_so(pool, caplog):
    began = time.monotonic()
    assert verify(pool, "evaluates", "[0 for _ in iter(int, 1)]") == [0.0]
    assert time.monotonic() - began < 15
    assert "took more than its processor time, 0.5 s" in caplog.text


def test_a_failure_before_the_completion_is_read_is_no_score(pool):
    with pytest.raises(RewardFailed, match=r"raised ValueError\('no answer'\)"):
        verify(pool, "fails_before", "7")


def test_what_a_library_imports_late_is_imported_outside_and_the_call_repeated(pool):
    assert verify(pool, "imports_late", "first", "again") == [1.0, 1.0]


async def test_many_texts_at_once_have_their_own_scores(pool):
    reward = ("hostile_verifiers:evaluates", {})
    calls = [
        pool.verify(reward, ["?", text, "7", {}], timeout=30.0)
        for text in [*map(str, range(40)), *["exit()"] * 5]
    ]
    assert [sum(parts.values()) for parts in await asyncio.gather(*calls)] == [
        *map(float, range(40)),
        *[0.0] * 5,
    ]
