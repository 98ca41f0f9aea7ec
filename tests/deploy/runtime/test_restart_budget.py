"""The restarts of a process: how many in a row, and how far apart."""

import pytest

from deploy.runtime.restart_budget import LONGEST_WAIT_SECONDS, RestartBudget


@pytest.mark.parametrize("limit", [0, 1, 8])
def test_waits_double_up_to_the_longest_until_the_limit(limit):
    budget = RestartBudget(limit)
    waits = [budget.next_wait(settled=False) for _ in range(limit + 1)]
    assert waits[:limit] == [min(2.0**n, LONGEST_WAIT_SECONDS) for n in range(limit)]
    assert waits[limit] is None
    assert budget.exhausted("actor-3", "boom") == (
        f"actor-3 died {limit + 1} times in a row, more than deploy.max_restarts = {limit} makes "
        "up for; the last error: boom"
    )


def test_a_process_that_had_worked_counts_anew():
    budget = RestartBudget(2)
    waits = [budget.next_wait(settled=settled) for settled in (False, False, True, False, False)]
    assert waits == [1.0, 2.0, 1.0, 2.0, None]


HEAD_SIZE = "vLLM did not start for '/tmp/x1/model': ValueError: Head size 24 is not supported"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (HEAD_SIZE, HEAD_SIZE.replace("x1", "y2")),
        ("PackageNotFoundError: No package metadata was found for flash_attn",) * 2,
        ("pid 17: bad magic at 0x7f3a00ff", "pid 4711: bad magic at 0x7f3b11ff"),
        ("object 9f3ac01b: no codec", "object 11e0ffa2: no codec"),
        ("RuntimeError: operator torchvision::nms does not exist",) * 2,
        ("ModuleNotFoundError: No module named 'skills.connectors'",) * 2,
        ("ValueError: no such option in user_settings",) * 2,
        ("TypeError: sigmoid() has no such signature",) * 2,
        ("TypeError: __init__() got an unexpected keyword argument 'timeout'",) * 2,
        ("its process died: ModuleNotFoundError: No module named 'async_timeout'",) * 2,
        ("PackageNotFoundError: No package metadata was found for memory-profiler",) * 2,
        ("NotImplementedError: no kernel for the device in use",) * 2,
        (HEAD_SIZE.replace("tmp", "scratch/a"), HEAD_SIZE.replace("tmp", "scratch/b")),
    ],
)
def test_what_fails_twice_in_the_same_way_before_any_work_is_final(first, second):
    budget = RestartBudget(5)
    assert budget.next_wait(settled=False, failure=first) == 1.0
    assert budget.next_wait(settled=False, failure=second) is None
    assert budget.exhausted("actor-3", second) == (
        f"actor-3 failed twice in the same way before it did any work: {second}"
    )


@pytest.mark.parametrize(
    "failure",
    [
        "its process died: The actor died unexpectedly before finishing this task.",
        "the system killed a process of vLLM, most likely since memory ran out",
        "Engine core initialization failed. Failed core proc(s): {}",
        "a process of the vLLM engine is gone",
        "worker exited by SIGSEGV",
        "Failed to connect to the GCS",
        "torch.OutOfMemoryError: CUDA out of memory",
        "OSError: [Errno 98] Address already in use",
        "OSError: [Errno 28] No space left on device",
        "actor-3 did not start within deploy.start_timeout_seconds = 600",
        "TimeoutError: the store timed out",
        "OSError: [Errno 5] Input/output error: '/data/model.safetensors'",
        "OSError: [Errno 116] Stale file handle",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "OSError: [Errno 113] No route to host",
        "HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/m",
        "HTTPError: 502 Server Error: Bad Gateway for url: https://huggingface.co/m",
        "ConnectionError: Connection refused by 127.0.0.1:4711",
        "AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable",
        "",
    ],
)
def test_what_may_pass_or_came_after_work_is_tried_again_to_the_limit(failure):
    budget = RestartBudget(3)
    waits = [budget.next_wait(settled=False, failure=failure) for _ in range(4)]
    assert waits == [1.0, 2.0, 4.0, None]
    assert "died 4 times in a row" in budget.exhausted("actor-3", failure)


def test_failures_that_differ_or_have_work_between_them_are_not_the_same():
    budget = RestartBudget(9)
    for failure in (HEAD_SIZE, "ValueError: no such layer", HEAD_SIZE, "", HEAD_SIZE):
        assert budget.next_wait(settled=False, failure=failure) is not None
