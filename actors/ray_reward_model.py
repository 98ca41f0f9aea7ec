"""Reward models in a Ray actor, and the client that rollout actors call.

The actor has no state but the models, so it is created anew when it dies, on another node where its
own is lost: clients find it by its name, and repeat calls whose answer was lost.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError, RayTaskError

from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.errors import RewardFailed, RewardModelLost
from actors.reward_models.scoring import RewardModels, load_reward_models
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.output_limits import keep_logs_small

NAME = "reward-model"
"""Name of the actor, which no two of a run have at a time."""
LOOK_SECONDS = 0.5
"""Seconds between two attempts to find, or to create, the process after another one's death."""
MAX_CONCURRENCY = 10_000
"""Texts that may wait for their score at once."""


def create_reward_model(
    paths: Sequence[str],
    config: RewardModelConfig,
    *,
    template_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Start the process of the reward models on the cluster, and return its handle in Ray.

    `template_options` are actors.chat_template_options, `options` are those of Ray.

    Raises:
        ActorAlreadyExistsError: There is one already.
    """
    remote = ray.remote(RewardModelActor).options(
        **{
            "name": NAME,
            "num_cpus": 0,
            "num_gpus": config.gpus,
            "max_concurrency": MAX_CONCURRENCY,
            **options,
        }
    )
    return remote.remote(tuple(paths), config, template_options)


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
    """A client of the reward models (a `TextScorer`); can be sent to other processes.

    `timeout` is the deadline of one score in seconds.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._actor: Any = None
        """Handle of the process that was found last; None once that is gone."""
        self._finding = asyncio.Lock()

    async def score(self, prompt: str | Sequence[Message], completion: str) -> float:
        """See `TextScorer.score`; repeats the call if the process is created anew in time."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._score(prompt, completion)
        except RayTaskError as error:
            if isinstance(error.cause, HeadwayError):
                raise error.cause from error
            raise RewardFailed(f"{NAME} failed: {error.cause!r}") from error
        except TimeoutError as error:
            raise RewardModelLost(f"{NAME} gave no score within {self._timeout:g} s") from error

    async def _score(self, prompt: str | Sequence[Message], completion: str) -> float:
        while True:
            actor = await self._find()
            try:
                return float(await actor.score.remote(prompt, completion))
            except RayTaskError:
                raise
            except RayError:  # however it died
                if self._actor is actor:
                    self._actor = None

    async def _find(self) -> Any:
        """Return the handle of the process, once there is one."""
        async with self._finding:
            while self._actor is None:
                with suppress(ValueError, RayError):  # there is none, or Ray does not answer
                    self._actor = await run_in_daemon_thread(lambda: ray.get_actor(NAME))
                if self._actor is None:
                    await asyncio.sleep(LOOK_SECONDS)
            return self._actor


class RewardModelProcess:
    """The process of the reward models, as the driver creates and ends it.

    `create` makes it in Ray, or returns None while there is no node for it.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self.handle: Any = None
        """Its handle in Ray; None while there is no process."""

    async def start(self, *, again: bool = False) -> None:
        """Create the process once there is a node for it, `again` if it is gone; load the models.

        Raises:
            InputError: A model cannot be used.
            RayError: The process died.
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

    async def live(self) -> None:
        """Wait for the death of the process; raise RayError then."""
        await self.handle.live.remote()

    async def ping(self) -> None:
        """Wait for an answer, which does not wait for scores; raise RayError if it is gone."""
        await self.handle.ping.remote()

    def stop(self, *, again: bool = False) -> None:
        """End the process, whether for good or to be started `again`."""
        if self.handle is not None:
            ray.kill(self.handle)
        self.handle = None
