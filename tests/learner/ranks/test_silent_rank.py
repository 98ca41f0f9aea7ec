"""A rank that answers no more ends its group, by name; one that is only late does not."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from learner.errors import RankFailed
from learner.ranks.ray_group import LearnerGroup

SILENT_SECONDS = 0.2


class Group(LearnerGroup):
    """Ranks that never end a run; `answers` says whether a rank answers its n-th question."""

    def __init__(self, *ranks):
        super().__init__(
            [self.rank(answers) for answers in ranks],
            silent_seconds=SILENT_SECONDS,
            loading_silent_seconds=SILENT_SECONDS,
            ping_seconds=0.001,
        )
        self.killed, self.answered = False, 0

    def rank(self, answers):
        asked = iter(answers)

        async def for_ever():
            await asyncio.Event().wait()

        async def ping():
            if not next(asked):
                await for_ever()
            self.answered += 1

        def called(function):
            return SimpleNamespace(remote=lambda *_: function())

        async def opened():
            return "host", 1

        waiting = dict.fromkeys(("start", "run", "live"), called(for_ever))
        return SimpleNamespace(**waiting, open_store=called(opened), ping=called(ping))

    def kill(self):
        self.killed = True


def always():
    while True:
        yield True


@pytest.mark.parametrize(
    "moment",
    [lambda group: group.start(), lambda group: group.run(None, None), lambda group: group.watch()],
    ids=["loading", "training", "after the last version"],
)
async def test_a_rank_that_hangs_ends_the_group_with_its_number(moment):
    group = Group(always(), [True, False, False])
    with pytest.raises(RankFailed, match=r"rank 1 hangs: no answer in 0\.2 s") as failed:
        await moment(group)
    assert group.killed
    assert failed.value.died


async def test_a_late_answer_is_forgiven_if_the_next_one_comes():
    group = Group(itertools.cycle([False, True]))
    running = asyncio.create_task(group.run(None, None))
    while group.answered < 3 and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not group.killed
    running.cancel()
