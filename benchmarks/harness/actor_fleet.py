"""Actors without a learner: the engines of a recipe with a broker and a publisher of weights."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from actors.ray_actor import ActorSpec, create_actor
from deploy.config.run_config import RunConfig
from deploy.driver.named_tasks import all_or_first_error, named
from learner.config.lora import CONFIG_FILE
from learner.model import lora
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.adapter import AdapterForm
from weight_sync.factory import make_publisher
from weight_sync.publish.background_publisher import BackgroundPublisher
from weight_sync.ray_broadcaster import create_broadcaster


@dataclass(frozen=True)
class Fleet:
    """A broker, a publisher, and actors that wait for their first version."""

    broker: BrokerClient
    actors: list[Any]
    publisher: BackgroundPublisher

    async def publish(self, version: int, model: Path) -> None:
        """Publish a model folder, an adapter folder, or a model of the hub to all actors."""
        weights = await asyncio.to_thread(load_weights, model)
        adapted = (model / CONFIG_FILE).exists()
        adapter = AdapterForm(scale=lora.read_adapter(model).config.scale) if adapted else None
        await asyncio.to_thread(self.publisher.publish, version, weights.items(), adapter)

    async def serve(self, **work: Awaitable[None]) -> None:
        """Run the actors and the named tasks until the first of the tasks ends, then close all."""
        runs = {f"actor-{i}": actor.run.remote() for i, actor in enumerate(self.actors)}
        first, *others = (named(name, task) for name, task in (work | runs).items())
        try:
            await all_or_first_error([first], meanwhile=others)
        finally:
            await self.broker.close()
            self.publisher.close()


def load_weights(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder, in one file or several, or of a model of the hub."""
    folder = model if model.is_dir() else Path(snapshot_download(str(model)))
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def run_spec(config: RunConfig, steps: int) -> RunSpec:
    """Return the batches of a recipe, for so many steps."""
    prompts = config.prompts
    return RunSpec(
        groups_per_batch=prompts.groups_per_batch, group_size=prompts.group_size, steps=steps
    )


async def start_fleet(
    config: RunConfig,
    model: str,
    ledger: Path,
    queues: QueuesConfig,
    steps: int,
    *,
    create: Callable[[ActorSpec], Any] = create_actor,
) -> Fleet:
    """Start the actors of a recipe on the connected cluster."""
    broker = create_broker(ledger, config=queues, spec=run_spec(config, steps))
    broadcaster = create_broadcaster(config.weight_sync.update_fraction, config.actors.count)
    actors = [
        create(
            ActorSpec(
                index=index,
                config=config.actors,
                weight_sync=config.weight_sync,
                model_path=model,
                seed=config.seed,
                group_size=config.prompts.group_size,
                heartbeat_seconds=config.queues.heartbeat_seconds,
                broker=broker,
                broadcaster=broadcaster,
            )
        )
        for index in range(config.actors.count)
    ]
    async with asyncio.timeout(config.deploy.start_timeout_seconds):
        await asyncio.gather(*(actor.start.remote() for actor in actors))
    return Fleet(broker, actors, make_publisher(config.weight_sync, broadcaster))
