"""Tasks of a run: what ends them, and how a failure reads."""

import asyncio

import pytest

from deploy.driver.named_tasks import all_or_first_error, named
from deploy.errors import RunFailed
from headway.errors import HeadwayError, InputError


async def forever():
    await asyncio.Event().wait()


async def fail(error):
    raise error


def outcome(*needed, meanwhile=()):
    """Return the tasks that were cancelled, by name, when all is over."""

    async def run():
        tasks = [named(f"part-{i}", work()) for i, work in enumerate(needed)]
        extra = [named("watcher", work()) for work in meanwhile]
        async with asyncio.timeout(5):
            try:
                await all_or_first_error(tasks, meanwhile=extra)
            finally:
                assert all(task.done() for task in [*tasks, *extra])
        return [task.get_name() for task in [*tasks, *extra] if task.cancelled()]

    return asyncio.run(run())


async def quick():
    await asyncio.sleep(0)


def test_it_ends_when_all_needed_tasks_have_and_takes_the_others_with_it():
    assert outcome(quick, quick, meanwhile=[forever]) == ["watcher"]


def test_the_first_failure_names_its_task_and_cancels_the_rest():
    with pytest.raises(RunFailed, match=r"part-1: ZeroDivisionError\('by zero'\)") as caught:
        outcome(forever, lambda: fail(ZeroDivisionError("by zero")))
    assert caught.value.exit_code == 1


def test_a_failing_watcher_ends_the_run_too():
    with pytest.raises(RunFailed, match="watcher"):
        outcome(forever, meanwhile=[lambda: fail(OSError("disk full"))])


def test_bad_input_keeps_its_message_and_its_exit_code():
    with pytest.raises(HeadwayError, match="part-0: no such model") as caught:
        outcome(lambda: fail(InputError("no such model")))
    assert caught.value.exit_code == 2
