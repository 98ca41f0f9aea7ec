"""Creates the processes of one run in Ray, with the settings that each needs."""

import os
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engines.model_folder import context_length, served_dtype
from actors.ray_actor import ActorSpec
from actors.ray_reward_model import RewardModelClient, RewardModelProcess, create_reward_model
from deploy.cluster.cpu_affinity import actors_on_cores
from deploy.cluster.placement import resource_requests
from deploy.cluster.placement_group import Reservation
from deploy.config.evaluation_schedule import evaluator, purpose
from deploy.config.run_config import RunConfig
from deploy.driver.actor_fleet import ActorFleet
from deploy.driver.learner_supervisor import LearnerSupervisor
from deploy.driver.run_context import RunContext
from deploy.driver.service_supervisor import ServiceSupervisor
from deploy.driver.supervisor import Supervisor
from deploy.observability.exporter import metrics_access
from deploy.observability.waits import ActorHealth
from deploy.storage.sessions import earlier_sessions
from headway import clock
from headway.roles import ProcessName, Role
from learner.ranks.ray_group import LearnerGroup, create_learner
from learner.ranks.spec import LearnerSpec
from queues.broker.status import BrokerStatus
from queues.config import RunSpec
from queues.ray_broker import create_broker
from weight_sync.ray_broadcaster import create_broadcaster


class Processes:
    """Broker, broadcaster, learner, rollout actors, and the process of the reward models."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        config, backup = context.config, context.directory.backup
        self._access = metrics_access(config.deploy) if config.deploy.metrics else None
        self.node = ray.get_runtime_context().get_node_id()
        """Ray's id of the node of broker, broadcaster and driver."""
        self._reservation = Reservation(
            resource_requests(config, driver_node=self.node),
            config.deploy.start_timeout_seconds,
            context.console,
            shared=config.deploy.ray_address != "local",
            fewest=fewest(config) if context.is_again else {},
        )
        self.broker = create_broker(
            context.directory.path,
            config=config.flow,
            spec=RunSpec(
                groups_per_batch=config.prompts.groups_per_batch,
                group_size=config.prompts.group_size,
                steps=config.steps,
                greedy_baseline=config.actors.greedy_baseline,
                pass_rate_cap=config.prompts.pass_rate_cap,
                pass_threshold=config.prompts.pass_threshold,
                curriculum=config.prompts.curriculum,
                seed=config.seed,
                backup=backup.resolve() if backup.is_symlink() else None,
                backup_seconds=config.deploy.backup_seconds,
            ),
            session=context.session,
        )
        self.broadcaster = create_broadcaster(
            config.weight_sync.update_fraction,
            config.actors.count,
            permit_seconds=config.weight_sync.timeout_seconds,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node, soft=False),
        )
        self._reward_models: RewardModelProcess | None = None
        """One process for all of them; None where no reward asks them."""
        if context.inputs.reward_models:
            self._reward_models = RewardModelProcess(self._create_reward_models)
        version, folder = context.checkpoint or (0, None)
        self.learner = LearnerSupervisor(
            context,
            LearnerSpec(
                config=config.objective,
                model_path=context.inputs.model_path,
                teachers=context.inputs.teachers,
                seed=config.seed,
                steps=config.steps,
                earlier=earlier_sessions(context.directory, config),
                temperature=config.actors.temperature,
                context=config.actors.max_model_len or context_length(context.inputs.model_path),
                served_dtype=served_dtype(context.inputs.model_path, config.actors.dtype),
                checkpoint=str(folder.resolve()) if folder else None,
                version=version,
                session_started_at=clock.now(),
                checkpoints=str(context.directory.checkpoints.resolve()),
                weight_sync=config.weight_sync,
            ),
            self._create_learner,
            (self.broker, self.broadcaster),
            access=self._access,
        )
        supervise = partial(ServiceSupervisor, context, access=self._access)
        self.services = [
            supervise(self.broker),
            supervise(self.broadcaster, on_restart=self.learner.announce_again),
            *([supervise(self._reward_models)] if self._reward_models else []),
        ]
        self.fleet = ActorFleet(
            context,
            self._actor_spec,
            self._reservation,
            (self.broker, self.broadcaster),
            learner_starts=lambda: self.learner.starts,
        )

    def supervisors(self) -> list[Supervisor]:
        """Return the supervisors of all processes."""
        return [self.learner, *self.services, *self.fleet.actors]

    def names(self) -> list[ProcessName]:
        """Return the names under which restarts are counted."""
        return [ProcessName(Role.DRIVER), *(process.name for process in self.supervisors())]

    def handles(self) -> dict[ProcessName, Any]:
        """Return the handles in Ray of all present processes."""
        return {name: at for process in self.supervisors() for name, at in process.handles.items()}

    async def status(self) -> BrokerStatus:
        """Ask the broker for its status, without the batches."""
        return await self.broker.status(after=self._context.config.steps)

    def health(self) -> dict[ProcessName, ActorHealth]:
        """Return the health of each actor that works."""
        return {a.name: health for a in self.fleet.actors if (health := a.health) is not None}

    def actors_lacking(self) -> int:
        """Return how many actors wait for resources, if none works or loads; else 0."""
        return 0 if self.fleet.active else self.fleet.lacking

    def restart_actor(self, name: str, reason: str, silent: float) -> None:
        """Restart an actor that works; see `Supervisor.restart`."""
        for actor in self.fleet.active:
            if actor.name == name:
                actor.restart(reason, silent)

    @property
    def reward_models_start(self) -> bool:
        """True while the process of the reward models is being made."""
        return any(s.starts for s in self.services if s.name.role is Role.REWARD_MODEL)

    def _create_learner(self, spec: LearnerSpec) -> LearnerGroup | None:
        """Create the ranks of the learner, those of lost nodes on others; None without room."""
        if not self._reservation.restore(Role.LEARNER):
            return None
        return create_learner(spec, partial(self._reservation.options, Role.LEARNER))

    def _create_reward_models(self) -> Any:
        """Create the process of the reward models, maybe on another node; None without room."""
        role, config = Role.REWARD_MODEL, self._context.config
        waits = role in self._reservation.awaited
        if not self._reservation.restore(role):
            if not waits:
                self._context.console.say(
                    "the reward models wait for a node with free resources, since theirs is lost"
                )
            return None
        return create_reward_model(
            self._context.inputs.reward_models,
            config.actors.reward_model,
            template_options=config.actors.chat_template_options,
            **self._reservation.options(role, 0),
        )

    def _actor_spec(self, number: int, count: int) -> ActorSpec:
        """Return what an actor is made from, given its number, where there are `count`."""
        config = self._context.config
        actors = config.actors.model_copy(update={"count": count})
        return ActorSpec(
            index=number,
            purpose=purpose(config.heldout, number),
            config=actors_on_cores(actors, os.sched_getaffinity(0), config.learner.cores),
            weight_sync=config.weight_sync,
            model_path=self._context.inputs.model_path,
            seed=config.seed,
            group_size=config.prompts.group_size,
            heartbeat_seconds=config.queues.heartbeat_seconds,
            broker=self.broker,
            broadcaster=self.broadcaster,
            reward_model_client=(
                RewardModelClient(timeout=config.actors.reward_timeout_seconds)
                if self._reward_models
                else None
            ),
            metrics=self._access,
            engine_metrics=config.deploy.engine_metrics,
            pinned_seconds=config.heldout.pinned_seconds if config.heldout else 0.0,
        )


def fewest(config: RunConfig) -> dict[Role, int]:
    """Return the fewest processes, by role, with which a run that has lost nodes goes on."""
    least = 1 if evaluator(config.heldout) is None else 2  # one evaluates, another generates
    return {Role.ACTOR: max(least, config.actors.min_count or 1)}
