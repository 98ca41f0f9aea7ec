"""One gateway on vLLM's app and a stand-in for its engine, for all tests of this folder."""

import pytest

from actors.config import ActorsConfig


@pytest.fixture(scope="session")
def standing(tmp_path_factory):
    from tests.actors.gateway.agents import chat
    from tests.actors.gateway.gateway_bench import GatewayBench
    from tests.actors.gateway.stand_in import stand_in_engine

    engine, client = stand_in_engine(tmp_path_factory.mktemp("model"))
    bench = GatewayBench(engine, ActorsConfig())
    bench.client = client
    yield bench
    client.reset()
    assert bench.run(chat(bench.open(), "add name")) == [("hello", [])]  # it lives
    bench.close()


@pytest.fixture
def bench(standing):
    """Yield the gateway, whose policy says hello, with nothing that earlier tests left."""
    client = standing.client
    standing.saved.clear()
    client.reset()
    standing.engine._interrupted = False
    yield standing
    for opened in [*standing.gateway._sessions.values()]:
        standing.run(opened.close())
