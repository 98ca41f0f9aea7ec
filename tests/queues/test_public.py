"""The methods of the broker, of its client, and of the protocols."""

import inspect

import pytest

from headway.ray_service import RayService
from queues.broker.broker import Broker
from queues.protocols import BatchQueue, PromptFeed, WorkQueue
from queues.ray_broker import BrokerClient


def surface(owner):
    """Public coroutine methods with their parameters, less those that Ray and the client add."""
    return {
        name: [
            str(parameter)
            for parameter in inspect.signature(method).parameters.values()
            if not parameter.name.startswith("_ray") and parameter.name != "epoch"
        ]
        for name, method in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize("protocol", [PromptFeed, WorkQueue, BatchQueue])
def test_the_broker_has_the_methods_of_the_protocols(protocol):
    assert {name: surface(Broker)[name] for name in surface(protocol)} == surface(protocol)


def test_the_client_has_every_method_of_the_broker():
    client = surface(BrokerClient)
    for name in surface(RayService):  # of the process around the broker
        del client[name]
    assert client == surface(Broker)
