"""Tasks of a run: what ends them, and how a failure reads."""

import asyncio
import gc
from functools import partial

import pytest

from deploy.driver.named_tasks import all_or_first_error, named
from deploy.errors import RunFailed
from headway.errors import InputError
from headway.user_code import PARAGRAPH


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


@pytest.mark.parametrize(
    ("needed", "meanwhile", "message", "exit_code"),
    [
        ([forever, partial(fail, ZeroDivisionError("by 0"))], [], r"part-1: ZeroDiv.*'by 0'", 1),
        ([forever], [partial(fail, OSError("disk full"))], r"watcher: OSError\('disk full'\)", 1),
        ([partial(fail, OSError(30, "Read-only", "/d"))], [], r"part-0: .* Read-only: '/d'", 1),
        ([partial(fail, InputError("no such model"))], [], "part-0: no such model", 2),
    ],
)
def test_the_first_failure_names_its_task_keeps_its_exit_code_and_cancels_the_rest(
    needed, meanwhile, message, exit_code
):
    with pytest.raises(RunFailed, match=f"^{message}") as caught:
        outcome(*needed, meanwhile=meanwhile)
    assert caught.value.exit_code == exit_code


def test_failures_of_one_moment_are_all_collected():
    """Else the event loop would print a traceback of the second one."""
    complaints = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        tasks = [named(f"part-{i}", fail(OSError("disk"))) for i in range(3)]
        with pytest.raises(RunFailed):
            await all_or_first_error(tasks[:2], meanwhile=tasks[2:])
        tasks.clear()
        gc.collect()

    asyncio.run(run())
    assert complaints == []


async def test_a_page_that_a_library_raises_is_cut_and_its_first_words_are_kept():
    error = LookupError("no such layer " + "weights, " * 2000)
    with pytest.raises(RunFailed, match=r"^actor-0: LookupError\('no such layer") as caught:
        await named("actor-0", fail(error))
    assert len(str(caught.value)) < PARAGRAPH + 100
