"""Transports between processes that they cannot connect are refused before anything is written."""

import pytest

from deploy.config.loader import load_recipe
from headway.errors import InputError

GPUS = ["learner.gpus=1", "actors.gpus=1"]
SHARES = ["learner.gpus=0.5", "actors.gpus=0.5"]


def settings(transport: str, *more: str) -> list[str]:
    return [f"weight_sync.transport={transport}", *more]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (settings("nccl"), r"learner\.gpus = 0, actors\.gpus = 0; give both a GPU"),
        (settings("ipc", "actors.gpus=1"), r"learner\.gpus = 0, actors\.gpus = 1; give both"),
        (settings("nccl", *GPUS, 'actors.engine="scripted"'), r"vLLM's own, and actors\.engine"),
        (settings("nccl", *GPUS, "weight_sync.codec=delta"), 'set codec = "full"'),
        (settings("nccl", *SHARES), r"may share one; set both to at least 1"),
        (settings("ipc", *GPUS), r"take 2; set one rank and shares that are at most 1 together"),
        (settings("ipc", *SHARES, "learner.ranks=2"), r"gpus = 0\.5 with ranks = 2"),
        (
            settings("ipc", *SHARES, "deploy.placement.actors.labels.a=b"),
            r"deploy\.placement\.actors may put actors and learner on different",
        ),
        (["deploy.placement.actors.labels.a=b"], r'set it to "object_store" or "filesystem"'),
    ],
)
def test_a_direct_transport_is_refused_where_it_cannot_work(overrides, message) -> None:
    with pytest.raises(InputError, match=message) as refused:
        load_recipe("demo", overrides)
    assert str(refused.value).count("\n") == 1


def test_a_dtype_that_would_round_the_factors_of_an_adapter_is_refused() -> None:
    rounds = ["learner.lora.rank=4", "weight_sync.wire_dtype=bfloat16"]
    with pytest.raises(InputError, match=r"would round the factors of \[learner.lora\]"):
        load_recipe("demo", rounds)
    load_recipe("demo", [*rounds, *settings("nccl", *GPUS)])


@pytest.mark.parametrize("overrides", [settings("nccl", *GPUS), settings("ipc", *SHARES)])
def test_a_direct_transport_is_taken_where_it_may_work(overrides) -> None:
    config = load_recipe("demo", overrides)
    assert not config.weight_sync.staged
    assert config.weight_sync.one_node == (config.weight_sync.transport == "ipc")
