"""The package's surface: what importing it costs, its methods, and the example of its page."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.ray_service import RayService
from queues.broker.broker import Broker
from queues.protocols import BatchQueue, PromptFeed, WorkQueue
from queues.ray_broker import BrokerClient

README = Path(__file__).parents[2] / "queues" / "README.md"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import queues.config, queues.errors, queues.records", "pyarrow ray numpy torch"),
        ("import queues.readers.accounting", "pyarrow ray torch"),
        ("import queues.broker.broker", "ray torch"),
    ],
)
def test_a_name_loads_no_more_than_it_needs(statement, absent):
    check = f"import sys; {statement}; print(*(set('{absent}'.split()) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == ""


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


def test_the_example_trains_its_group(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out == "['g00000001']\n1\n"
