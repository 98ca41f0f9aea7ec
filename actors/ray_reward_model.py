"""Reward models in a Ray actor, and the client that rollout actors call.

The actor has no state but the models, so Ray restarts it when it dies: it loads them at the first
call, and calls whose answer was lost are repeated. The driver's supervisor counts the restarts.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.errors import ActorsError, RewardFailed, RewardModelLost
from actors.reward_models.scoring import RewardModels, load_reward_models
from queues.runtime.output_limits import keep_logs_small

NAME = "reward-model"
MAX_CONCURRENCY = 10_000
"""Texts that may wait for their score at once."""


def create_reward_model(
    paths: Sequence[str],
    config: RewardModelConfig,
    *,
    timeout: float,
    template_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> "RewardModelClient":
    """Start the process of the reward models on the cluster; `start` loads them.

    `timeout` is the deadline of one score in seconds, `template_options` are
    actors.chat_template_options, `options` are those of Ray.
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
    handle = remote.remote(tuple(paths), config, template_options)
    return RewardModelClient(handle, timeout=timeout)


class RewardModelActor:
    """The Ray actor; arguments as in `load_reward_models`, which the first call runs."""

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
        return NAME

    async def start(self) -> None:
        """Load the models; raise InputError if one cannot be used."""
        await self._loaded()

    async def score(self, prompt: str | Sequence[Message], completion: str) -> float:
        """See `TextScorer.score`."""
        return await (await self._loaded()).score(prompt, completion)

    async def ping(self) -> None:
        """Answer; models are loaded, and score, in threads of their own."""

    async def live(self) -> NoReturn:
        """Never return: a call fails when the process dies."""
        while True:
            await asyncio.Event().wait()

    async def _loaded(self) -> RewardModels:
        async with self._loading:
            if self._models is None:
                self._models = await asyncio.to_thread(load_reward_models, *self._arguments)
            return self._models


class RewardModelClient:
    """A client of the reward models (a `TextScorer`); can be sent to other processes."""

    def __init__(self, actor: Any, *, timeout: float) -> None:
        self.handle, self._timeout = actor, timeout

    async def start(self, *, again: bool = False) -> None:
        """Load the models; `again` waits for a process that restarts, any number of times.

        Raises:
            InputError: A model cannot be used.
            RayError: The process died.
        """
        await self.handle.start.options(max_task_retries=-1 if again else 0).remote()

    async def score(self, prompt: str | Sequence[Message], completion: str) -> float:
        """See `TextScorer.score`; repeats the call if the process restarts in time."""
        call = self.handle.score.options(max_task_retries=-1)
        try:
            async with asyncio.timeout(self._timeout):
                return float(await call.remote(prompt, completion))
        except RayTaskError as error:
            if isinstance(error.cause, ActorsError):
                raise error.cause from error
            raise RewardFailed(f"{NAME} failed: {error.cause!r}") from error
        except RayError as error:
            raise RewardModelLost(f"the process of {NAME} is gone: {error}") from error
        except TimeoutError as error:
            raise RewardModelLost(f"{NAME} gave no score within {self._timeout:g} s") from error

    async def live(self) -> None:
        """Wait for the death of the process, which Ray restarts; raise RayError then."""
        await self.handle.live.remote()

    async def ping(self) -> None:
        """Wait for an answer, which does not wait for scores; raise RayError if it is gone."""
        await self.handle.ping.remote()

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or so that Ray starts it `again`."""
        ray.kill(self.handle, no_restart=not again)
