"""Calls of user code: whatever it raises is an exception of the call."""

import asyncio
import concurrent.futures

import pydantic
import pytest

from headway.user_code import PARAGRAPH, call, shown


class Base(BaseException):
    pass


def raising(error, *, coroutine):
    def plain():
        raise error

    async def later():
        plain()

    return later if coroutine else plain


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
        concurrent.futures.CancelledError(), StopIteration(1), StopAsyncIteration(), Base("base"),
        TimeoutError(), MemoryError(),
    ],
    ids=repr,
)  # fmt: skip
async def test_whatever_user_code_raises_is_an_exception_of_the_call(error, coroutine):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        async with asyncio.timeout(10):
            await call(raising(error, coroutine=coroutine))
    assert type(error).__name__ in repr(caught.value)


async def test_a_call_that_is_cancelled_is_cancelled():
    task = asyncio.ensure_future(call(asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await call(asyncio.Event().wait)


class Page:
    """A value whose repr is a page."""

    def __repr__(self):
        return "Page(" + "column, " * 1000 + ")"


class Wanted(pydantic.BaseModel):
    length: int
    parts: list[int]


def invalid():
    try:
        Wanted(length=Page(), parts=["a" * 5000])
    except pydantic.ValidationError as error:
        return error


@pytest.mark.parametrize("value", [Page(), ValueError(Page()), KeyError("x\n" * 2000), invalid()])
def test_what_a_library_shows_of_a_page_is_cut(value):
    assert len(shown(value, PARAGRAPH)) < PARAGRAPH + 30


def test_an_error_of_validation_is_described_by_its_messages_alone():
    assert shown(invalid()) == (
        "ValidationError(length: Input should be a valid integer; parts.0: Input should be a valid "
        "integer, unable to parse string as an integer)"
    )
