"""While weights are prepared the engine is asked seldom, and short preparations end soon."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import engine_spec

from actors.engines.vllm import VllmEngine

pytestmark = pytest.mark.vllm


class Workers:
    """The endpoint of an engine of two workers, in a time of its own, that prepare for a while."""

    errored = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.took, self.begun = 0.0, 0.0, 0.0
        self.asked: list[float] = []
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        if method == "prepare_weights":
            self.begun, self.asked = self.now, []
            return [True, True]
        assert method == "weights_prepared"
        self.asked.append(self.now - self.begun)
        return [took if self.asked[-1] >= took else 0.0 for took in (self.took, self.took / 2)]


@pytest.mark.parametrize(("took", "most_late"), [(0.004, 0.001), (0.06, 0.01), (0.9, 0.25), (7, 1)])
def test_an_engine_is_asked_at_most_four_times_a_second_and_soon_after_it_has_prepared(
    took, most_late, monkeypatch
) -> None:
    staged: Any = SimpleNamespace(manifest=SimpleNamespace(to_json=lambda: "{}", version=1))
    engine = VllmEngine(engine_spec(""), max_model_len=64)
    engine._engine = workers = Workers(monkeypatch)
    workers.took = took
    for _ in range(2):
        asyncio.run(engine.prepare(staged))
        assert engine.prepared == "{}"
        windows = zip(workers.asked, workers.asked[4:], strict=False)
        assert all(later - earlier >= 1 for earlier, later in windows)
    assert took <= workers.asked[-1] <= took + most_late
