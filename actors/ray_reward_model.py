"""Reward models as a process of Ray, and the client that rollout actors ask.

The process keeps nothing but the models, so that Ray itself makes it again when it dies: every life
loads them when it is first asked, and scores whose answer was lost are asked for again. Who counts
its deaths is `deploy.driver.reward_model_supervisor`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from actors.config import RewardModelConfig
from actors.errors import ActorsError, RewardFailed, RewardModelLost
from actors.reward_models.scoring import RewardModels, load_reward_models

NAME = "reward-model"
MAX_CONCURRENCY = 10_000
"""Texts that may wait for their score at once."""


def create_reward_model(
    paths: Sequence[str], config: RewardModelConfig, *, timeout: float, **options: Any
) -> "RewardModelClient":
    """Starts the process of the reward models on the cluster; it has yet to load them.

    Args:
        paths: Local folders or hub names.
        config: Section `[actors.reward_model]`.
        timeout: Deadline in seconds of one score.
        **options: Ray actor options such as `scheduling_strategy`.
    """
    remote = ray.remote(RewardModelActor).options(
        **{
            "num_cpus": 0,
            "num_gpus": config.gpus,
            "max_restarts": -1,
            "max_concurrency": MAX_CONCURRENCY,
            **options,
        }
    )
    return RewardModelClient(remote.remote(tuple(paths), config), timeout=timeout)


class RewardModelActor:
    """The process; arguments as `load_reward_models`, which the constructor only keeps."""

    def __init__(self, paths: Sequence[str], config: RewardModelConfig) -> None:
        self._paths, self._config = paths, config
        self._loading = asyncio.Lock()
        self._models: RewardModels | None = None

    def __repr__(self) -> str:
        return NAME

    async def start(self) -> None:
        """Loads the models.

        Raises:
            InputError: One cannot be used.
        """
        await self._loaded()

    async def score(self, prompt: str, completion: str) -> float:
        """See `Judge.score`."""
        return await (await self._loaded()).score(prompt, completion)

    async def live(self) -> NoReturn:
        """Never returns: who waits for it learns of the death of the process."""
        while True:
            await asyncio.Event().wait()

    async def _loaded(self) -> RewardModels:
        async with self._loading:
            if self._models is None:
                self._models = await asyncio.to_thread(
                    load_reward_models, self._paths, self._config
                )
            return self._models


class RewardModelClient:
    """The reward models from any process of the cluster (a `Judge`); can be sent to others."""

    def __init__(self, actor: Any, *, timeout: float) -> None:
        self._actor, self._timeout = actor, timeout

    @property
    def handle(self) -> Any:
        """Of the process in Ray, over all its lives."""
        return self._actor

    async def start(self, *, again: bool = False) -> None:
        """Loads the models; the caller sets the deadline.

        Args:
            again: Wait for the process to come back, however often it has to be made.

        Raises:
            InputError: One cannot be used.
            RayError: The process died.
        """
        await self._actor.start.options(max_task_retries=-1 if again else 0).remote()

    async def score(self, prompt: str, completion: str) -> float:
        """See `Judge.score`; asks again where the process died and came back in time."""
        ask = self._actor.score.options(max_task_retries=-1)
        try:
            async with asyncio.timeout(self._timeout):
                return float(await ask.remote(prompt, completion))
        except RayTaskError as error:
            if isinstance(error.cause, ActorsError):
                raise error.cause from error
            raise RewardFailed(f"{NAME} failed: {error.cause!r}") from error
        except RayError as error:
            raise RewardModelLost(f"the process of {NAME} is gone: {error}") from error
        except TimeoutError as error:
            raise RewardModelLost(f"{NAME} gave no score within {self._timeout:g} s") from error

    async def live(self) -> None:
        """Waits for the death of the process, which is made again meanwhile.

        Raises:
            RayError: It died.
        """
        await self._actor.live.remote()

    def stop(self) -> None:
        """Ends the process for good."""
        ray.kill(self._actor)
