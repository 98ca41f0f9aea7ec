"""The processes of one run in Ray: created here, with what the recipe says of each.

Where they are placed is `placement`'s and `cores`' to say; what they do for each other is `run`'s.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_actor import create_actor
from actors.ray_reward_model import create_reward_model
from deploy.cluster.cpu_affinity import actors_on_cores
from deploy.cluster.placement import options, wants
from deploy.cluster.placement_group import Reservation
from deploy.config import evaluation_schedule as heldout
from deploy.config.run_config import RunConfig
from deploy.driver.actor_supervisor import Supervisor
from deploy.driver.reward_model_supervisor import RewardModelSupervisor
from deploy.preflight.inputs import Inputs
from deploy.runtime.console import Screen
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from learner.ranks.ray_group import create_learner
from learner.ranks.spec import LearnerSpec
from queues.ray_broker import create_broker
from queues.runtime.cpu_affinity import parse_cores
from weight_sync.ray_broadcaster import create_broadcaster


class Processes:
    """Broker, broadcaster, learner, rollout actors, and the process of the reward models."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        directory: RunDirectory,
        record: Record,
        rows: JsonlWriter,
        screen: Screen,
        *,
        checkpoint: tuple[int, Path] | None,
    ) -> None:
        self._config, self._inputs = config, inputs
        self._record, self._rows, self._screen = record, rows, screen
        self._metrics_host = config.deploy.metrics_host if config.deploy.metrics else None
        self.node = ray.get_runtime_context().get_node_id()
        """Ray's id of the node of broker, broadcaster and driver."""
        self._here = NodeAffinitySchedulingStrategy(self.node, soft=False)
        shared = config.deploy.ray_address != "local"
        self._room = Reservation(
            wants(config, here=self.node) if shared else [],
            config.deploy.start_timeout_seconds,
            screen,
        )
        self.broker = create_broker(
            directory.path,
            config=config.flow,
            groups_per_batch=config.prompts.groups_per_batch,
            group_size=config.prompts.group_size,
            steps=config.steps,
            greedy_baseline=config.actors.greedy_baseline,
            pass_rate_cap=config.prompts.pass_rate_cap,
            pass_threshold=config.prompts.pass_threshold,
        )
        self.broadcaster = create_broadcaster(
            config.weight_sync.update_fraction,
            config.actors.count,
            permit_seconds=config.weight_sync.timeout_seconds,
        )
        self.judges = self._make_judges()
        """One, where a reward asks reward models."""
        learners = config.deploy.placement.learner
        version, folder = checkpoint or (0, None)
        self.learner = create_learner(
            LearnerSpec(
                config=config.objective,
                model_path=inputs.model_path,
                seed=config.seed,
                steps=config.steps,
                temperature=config.actors.temperature,
                checkpoint=str(folder) if folder else None,
                version=version,
                checkpoints=str(directory.checkpoints),
                weight_sync=config.weight_sync,
            ),
            lambda rank: self._place("learner", rank, options(learners, self._here)),
        )
        self.actors = self._make_actors()

    def handles(self) -> dict[str, Any]:
        """Of the processes in Ray that there are now, by name."""
        return {
            "broker": self.broker.handle,
            "broadcaster": self.broadcaster.actor,
            **{judge.name: judge.client.handle for judge in self.judges},
            **{f"learner-{rank}": each for rank, each in enumerate(self.learner.handles)},
            **{a.name: a.handle for a in self.actors if a.handle is not None},
        }

    def _place(self, role: str, number: int, unreserved: dict[str, Any]) -> dict[str, Any]:
        """Ray's options of a process: where it has room, or what applies where none is reserved.

        Custom resources are asked for in a bundle too, so that `ray status` counts them as used.
        """
        reserved = self._room.options(role, number)
        return {**reserved, "resources": unreserved.get("resources")} if reserved else unreserved

    def _make_judges(self) -> list[RewardModelSupervisor]:
        """The process of the reward models, where a reward asks them."""
        config, models = self._config, self._inputs.reward_models
        placement = config.deploy.placement
        if not models:
            return []
        judge = create_reward_model(
            models,
            config.actors.reward_model,
            timeout=config.actors.reward_timeout_seconds,
            **self._place("reward_model", 0, options(placement.reward_model, self._here)),
        )
        return [
            RewardModelSupervisor(
                judge,
                config=config.deploy,
                record=self._record,
                rows=self._rows,
                screen=self._screen,
                metrics_host=self._metrics_host,
            )
        ]

    def _make_actors(self) -> list[Supervisor]:
        """The rollout actors; on other nodes too, where weights cross between nodes."""
        config = self._config
        create = partial(
            create_actor,
            config=actors_on_cores(
                config.actors,
                os.sched_getaffinity(0),
                set(parse_cores(config.learner.cores)) if config.learner.cores else set(),
            ),
            weight_sync=config.weight_sync,
            model_path=self._inputs.model_path,
            seed=config.seed,
            group_size=config.prompts.group_size,
            heartbeat_seconds=config.queues.heartbeat_seconds,
            broker=self.broker,
            broadcaster=self.broadcaster,
            judge=self.judges[0].client if self.judges else None,
            metrics_host=self._metrics_host,
            engine_metrics=config.deploy.engine_metrics,
            pinned_seconds=config.heldout.pinned_seconds if config.heldout else 0.0,
        )
        anywhere = options(
            config.deploy.placement.actors,
            self._here if config.weight_sync.one_node else "SPREAD",
        )
        return [
            Supervisor(
                index,
                partial(
                    create,
                    index,
                    purpose=heldout.purpose(config.heldout, index, config.actors.count),
                    **self._place("actors", index, anywhere),
                ),
                broker=self.broker,
                broadcaster=self.broadcaster,
                config=config.deploy,
                record=self._record,
                rows=self._rows,
                screen=self._screen,
                pinned_seconds=heldout.pinned_seconds(config.heldout, index, config.actors.count),
            )
            for index in range(config.actors.count)
        ]
