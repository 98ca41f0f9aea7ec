"""Reward models in a Ray actor, and the client that rollout actors call.

The actor has no state but the models, so it is created anew when it dies, perhaps on another node:
clients find it by its name, and repeat calls whose answer was lost.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError, RayTaskError

from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.errors import RewardFailed, RewardModelLost
from actors.reward_models.scoring import RewardModels, load_reward_models
from headway.daemon_thread import run_in_daemon_thread
from headway.output_limits import keep_logs_small
from headway.ray_service import MAX_CONCURRENCY, RayService, ServiceProcess
from headway.roles import Role

LOOK_SECONDS = 0.5
"""Seconds between two attempts to find, or to create, the process after another one's death."""


def create_reward_model(
    paths: Sequence[str],
    config: RewardModelConfig,
    *,
    template_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Start the process of the reward models on the cluster, and return its handle in Ray.

    Its name in Ray is its role, so that ActorAlreadyExistsError is raised for a second one.
    `template_options` are actors.chat_template_options, `options` are those of Ray.
    """
    remote = ray.remote(RewardModelActor).options(
        **{
            "name": Role.REWARD_MODEL.value,
            "num_cpus": 0,
            "num_gpus": config.gpus,
            "max_concurrency": MAX_CONCURRENCY,
            **options,
        }
    )
    return remote.remote(tuple(paths), config, template_options)


class RewardModelActor(ServiceProcess):
    """The Ray actor; the first call runs `load_reward_models`, in a thread, with its arguments."""

    def __init__(
        self,
        paths: Sequence[str],
        config: RewardModelConfig,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        keep_logs_small()
        self._arguments = paths, config, template_options
        self._loading = asyncio.Lock()
        self._models: RewardModels | None = None

    def __repr__(self) -> str:
        return Role.REWARD_MODEL.value

    async def start(self) -> None:
        """Load the models; raise InputError if one cannot be used."""
        await self._loaded()

    async def score(
        self, prompt: str | Sequence[Message], completion: str
    ) -> float | Mapping[str, float]:
        """See `TextScorer.score`."""
        return await (await self._loaded()).score(prompt, completion)

    async def _loaded(self) -> RewardModels:
        async with self._loading:
            if self._models is None:
                self._models = await asyncio.to_thread(load_reward_models, *self._arguments)
            return self._models


class RewardModelClient(RayService):
    """A `TextScorer` that finds the process by its name; `timeout` is the deadline of one score."""

    role, lost = Role.REWARD_MODEL, RewardModelLost

    def __init__(self, timeout: float) -> None:
        super().__init__(None)
        self._timeout = timeout
        self._finding = asyncio.Lock()

    def __reduce__(self) -> tuple[type[Self], tuple[float]]:
        return type(self), (self._timeout,)

    async def score(
        self, prompt: str | Sequence[Message], completion: str
    ) -> float | Mapping[str, float]:
        """See `TextScorer.score`; repeats the call if the process is created anew in time."""

        async def send() -> Any:
            process = await self._find()
            try:
                return await process.score.remote(prompt, completion)
            except RayError as error:
                if self.handle is process and not isinstance(error, RayTaskError):
                    self.handle = None  # however it died
                raise

        try:
            async with asyncio.timeout(self._timeout):
                score: float | Mapping[str, float] = await self.repeat("score", send, math.inf)
                return score
        except TimeoutError as error:
            text = f"{self.role} gave no score within {self._timeout:g} s"
            raise RewardModelLost(text) from error

    async def explained(self, error: RayError) -> Exception:
        """Return what a failed call raises: a bug in the models fails the reward."""
        failed = await super().explained(error)
        if isinstance(failed, RayTaskError):
            return RewardFailed(f"{self.role} failed: {failed.cause!r}")
        return failed

    async def is_made_again(self, error: RayError) -> bool:
        """Return True: another process is looked for."""
        return True

    async def _find(self) -> Any:
        """Return the handle of the process, once there is one."""
        async with self._finding:
            while self.handle is None:
                with suppress(ValueError, RayError):  # there is none, or Ray does not answer
                    self.handle = await run_in_daemon_thread(lambda: ray.get_actor(self.role.value))
                if self.handle is None:
                    await asyncio.sleep(LOOK_SECONDS)
            return self.handle


class RewardModelProcess(RayService):
    """The process for its driver; `create` makes it, or returns None while no node has space."""

    role, lost = Role.REWARD_MODEL, RewardModelLost

    def __init__(self, create: Callable[[], Any]) -> None:
        super().__init__(None)
        self._create = create

    async def start(self, *, again: bool = False) -> None:
        """Create the process once there is a node for it, `again` if it is gone; load the models.

        Raises InputError for a model that cannot be used, RayError if the process died.
        """
        if again:
            self.stop()
        while self.handle is None:
            await run_in_daemon_thread(self._create_anew)
            if self.handle is None:
                await asyncio.sleep(LOOK_SECONDS)
        await self.handle.start.remote()

    def _create_anew(self) -> None:
        with suppress(ActorAlreadyExistsError):  # Ray has not noticed that the one before is gone
            self.handle = self._create()

    def stop(self, *, again: bool = False) -> None:
        """End the process, whether for good or to be started `again`."""
        if self.handle is not None:
            super().stop()
        self.handle = None
