"""A deterministic engine without a model, for tests and for load on everything around engines.

Tokens, log-probabilities and lengths are hashes of (prompt, seed, position). Versions, pausing,
updates and their failures behave as with vLLM: the same contract tests pass.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import xxhash

from actors.engines.protocol import Generation, SamplingParameters
from actors.errors import EngineDied, EngineStale
from queues.records import FinishReason
from weight_sync.errors import IncompatibleWeights, LoadFailed
from weight_sync.manifest import Signature, check_signature
from weight_sync.probe import Sequences
from weight_sync.receive.staging import StagedWeights

TICK_SECONDS = 0.005
"""Shortest time between two bursts of tokens, so that many requests stay cheap."""


@dataclass(eq=False)
class ScriptedEngine:
    """Samples from hashes (a `RolloutEngine`)."""

    shapes: Mapping[str, tuple[int, ...]]
    """Names and shapes of the weights that it takes; others fail to load."""
    _: KW_ONLY
    vocabulary: int = 64
    """Token ids are below this."""
    eos_token_id: int = 1
    """Ends a continuation that is shorter than its limit."""
    tokens_per_second: float | None = None
    """Speed of each request; None is as fast as possible."""
    median_length: float = 32.0
    """Median number of tokens, the end-of-sequence token included."""
    length_sigma: float = 0.0
    """Standard deviation of the logarithm of the length; 0 makes all lengths equal."""
    initial_version: int | None = None
    """Version before any update; None starts STALE."""

    def __post_init__(self) -> None:
        self.version = self.initial_version
        """Version that stamps the tokens; None before the first."""
        self._runs = asyncio.Event()
        self._interrupted = False
        self._closed = False

    async def start(self) -> None:
        self._runs.set()

    def inventory(self) -> Signature:
        return {name: (None, shape) for name, shape in self.shapes.items()}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`; without a seed the request id decides the tokens."""
        self._check_open()
        if self.version is None:
            raise EngineStale(f"{request_id}: no policy version has been loaded yet")
        origin = f"{list(prompt_ids)}|{request_id if sampling.seed is None else sampling.seed}"
        length = self._length(origin)
        count = min(length, sampling.max_new_tokens)
        rate = self.tokens_per_second
        burst = 1 if rate is None else max(1, round(rate * TICK_SECONDS))
        token_ids: list[int] = []
        versions: list[int] = []
        while len(token_ids) < count:
            await asyncio.sleep(0 if rate is None else burst / rate)
            await self._runs.wait()
            self._check_open()
            if self._interrupted:
                break
            for position in range(len(token_ids), min(len(token_ids) + burst, count)):
                token_ids.append(self._token(origin, position, length))
                versions.append(self.version)
        whole = FinishReason.STOP if length == count else FinishReason.LENGTH
        return Generation(
            token_ids=token_ids,
            logprobs=[-_unit(f"{origin}|{position}|logprob") for position in range(len(token_ids))],
            versions=versions,
            finish_reason=whole if len(token_ids) == count else FinishReason.ABORTED,
            cache_salt=str((versions or [self.version])[0]) if cache_salt is None else cache_salt,
        )

    async def score(self, sequences: Sequences) -> None:
        """See `RolloutEngine.score`; there is no model."""

    async def interrupt(self) -> None:
        self._check_open()
        self._interrupted = True
        self._runs.set()

    async def prepare(self, weights: StagedWeights) -> None:
        """See `UpdatableEngine.prepare`; there is nothing to do."""

    async def pause(self) -> None:
        self._check_open()
        self._runs.clear()

    async def load(self, weights: StagedWeights, version: int) -> None:
        """See `UpdatableEngine.load`; reads the first byte of every tensor."""
        try:
            check_signature(weights.manifest, self.inventory())
        except IncompatibleWeights as error:
            raise LoadFailed(str(error)) from error
        for _, tensor in weights.tensors():
            tensor.reshape(-1)[0].item()
        self.version = version

    async def resume(self) -> None:
        self._runs.set()

    async def close(self) -> None:
        self._closed = True
        self._runs.set()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDied("the engine was closed")

    def _length(self, origin: str) -> int:
        """Return a lognormal length (Box and Muller), the end-of-sequence token included."""
        radius = math.sqrt(-2 * math.log(1 - _unit(f"{origin}|radius")))
        normal = radius * math.cos(2 * math.pi * _unit(f"{origin}|angle"))
        return max(1, round(self.median_length * math.exp(self.length_sigma * normal)))

    def _token(self, origin: str, position: int, length: int) -> int:
        """Return a token id; the end-of-sequence token comes only at the end."""
        if position == length - 1:
            return self.eos_token_id
        token = int(_unit(f"{origin}|{position}") * (self.vocabulary - 1))
        return token + (token >= self.eos_token_id)


def _unit(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return xxhash.xxh3_64_intdigest(text.encode()) / 2**64
