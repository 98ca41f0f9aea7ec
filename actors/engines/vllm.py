"""Generates with vLLM, which is not imported before `start`.

One engine is one AsyncLLM with its worker processes. Weights come through the transfer backend
"headway" (`weight_sync.vllm.plugin`), log-probabilities are those of the distribution that tokens
were sampled from, and vLLM stamps the version on every token.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from actors.engines.model_folder import published_shapes
from actors.engines.protocol import EngineSpec, Generation, SamplingParameters
from actors.engines.vllm_arguments import engine_arguments
from actors.engines.vllm_output import captured, died, log_to, start_error, typed_errors
from actors.engines.vllm_processes import import_beside, start_as_forks
from actors.engines.vllm_sampled import Sampled
from actors.errors import EngineDied, EngineStale
from weight_sync.errors import LoadFailed
from weight_sync.manifest import Signature
from weight_sync.probe import Scores, Sequences
from weight_sync.receive.staging import StagedWeights
from weight_sync.vllm.transfer import transfer

WARM_UP_TOKENS = 8
PAUSE_MODES = {"in_flight": "keep", "between_requests": "wait"}
PREPARED_POLL_SECONDS = 0.25
"""Interval of asking whether weights are prepared, which holds up the engine between two steps."""
DEATH_POLL_SECONDS = 1.0
"""Interval in which a call that has no answer yet looks whether the engine still lives."""
T = TypeVar("T")

SHUTDOWN_SECONDS = 20.0
"""Time that vLLM's processes have to end by themselves before they are killed."""


class VllmEngine:
    """A vLLM engine whose weights can be replaced in flight (a `RolloutEngine`)."""

    def __init__(self, spec: EngineSpec, max_model_len: int) -> None:
        self._spec = spec
        self.model_path = spec.model_path
        self._max_model_len = max_model_len
        self._version = spec.initial_version
        self._loads = 0
        """Loads of the present version after its first, with other weights as it may be."""
        self._engine: Any = None
        self._admits = asyncio.Event()
        """Cleared while the engine is paused: requests wait for it and not in vLLM's queue."""
        self._admits.set()
        self._unstarted: set[str] = set()
        """Requests without a token whose salt names the version that they were admitted under."""
        self._recalled: set[str] = set()
        """Requests without a token that a pause took back; they are admitted again after it."""
        self._requests: set[str] = set()
        self._numbers = itertools.count()
        """Numbers of the probes."""
        self._interrupted = False
        self._load_failed = False
        """True if vLLM's workers may believe that an update has not ended."""
        self.prepared: str | None = None
        """Manifest of the weights that vLLM's workers have prepared."""
        self._prepare_seconds = PREPARED_POLL_SECONDS
        """Time that the newest preparation took, after which the next is asked for first."""

    async def start(self) -> None:
        """See `RolloutEngine.start`; takes half a minute, and generates a few tokens to warm up.

        Raises InputError if vLLM cannot load the model with these settings, and EngineDied if a
        process of vLLM failed, or the system lacks something that it needs now; names the cause.
        """
        with captured(self._spec.log) as printed:
            import_beside(self._spec)
            arguments = engine_arguments(self._spec, self._max_model_len)
            if not self._spec.config.gpus:
                start_as_forks()
            from vllm import AsyncEngineArgs
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            # On GPUs vLLM batches several times as many tokens for its offline class as otherwise.
            offline = self._spec.config.gpus > 0
            usage = UsageContext.LLM_CLASS if offline else UsageContext.ENGINE_CONTEXT
            try:
                self._engine = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**arguments), usage_context=usage
                )
            except (ValueError, OSError, RuntimeError) as error:
                raise start_error(self._spec.model_path, error, printed()) from error
        if self._spec.log is not None:
            log_to(self._spec.log)
        try:
            with typed_errors():
                if self._spec.weight_sync.staged:
                    shared = {"shared": self._spec.config.gpus < 1}
                    await self._engine.init_weight_transfer_engine(
                        WeightTransferInitRequest(init_info=shared)
                    )
                label = -1 if self._version is None else self._version
                await self._engine.update_weight_version(str(label))
                sampling = SamplingParameters(temperature=1.0, max_new_tokens=WARM_UP_TOKENS)
                warm_up = Sampled("warm-up", "warm-up")
                async for _ in self._requested([0], self.parameters(sampling), warm_up):
                    pass
        except BaseException:
            await self.close()
            raise

    def inventory(self) -> Signature:
        """See `RolloutEngine.inventory`; weights of any dtype are cast when loaded."""
        shapes = published_shapes(self._spec.model_path)
        return {name: (None, shape) for name, shape in shapes.items()}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        sampled = Sampled(request_id)
        parameters = self.parameters(sampling)
        async with aclosing(self.outputs(prompt_ids, parameters, sampled, cache_salt)) as outputs:
            async for _ in outputs:
                pass
        return sampled.generation()

    async def outputs(
        self,
        prompt_ids: Sequence[int],
        parameters: Any,
        sampled: Sampled,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of one request with `parameters`, and add them to `sampled`.

        Yields nothing where the engine is interrupted. Nothing is yielded of a request without a
        token that a pause took back, before it is admitted again. Closing the generator aborts the
        request. Raises as `generate`.
        """
        request_id = sampled.request_id
        if self._version is None:
            raise EngineStale(f"{request_id}: no policy version has been loaded yet")
        with typed_errors():
            recalled = True
            while recalled:
                await self._admitted()
                sampled.cache_salt = self._salt() if cache_salt is None else cache_salt
                if self._interrupted:
                    return
                recalled = False
                if cache_salt is None:
                    self._unstarted.add(request_id)
                async with aclosing(self._requested(prompt_ids, parameters, sampled)) as outputs:
                    async for output in outputs:
                        aborted = output.outputs[0].finish_reason == "abort"
                        recalled = aborted and request_id in self._recalled
                        if not recalled:
                            sampled.add(output)
                            yield output

    def _salt(self) -> str:
        """Return the salt of a new rollout, which keeps KV caches of other weights apart."""
        return f"{self._version}+{self._loads}" if self._loads else f"{self._version}"

    async def score(self, sequences: Sequences) -> tuple[Scores, Scores] | None:
        """See `RolloutEngine.score`; two requests for each sequence, beside those of rollouts."""
        await self._admitted()
        weights, number = (self._version, self._loads), next(self._numbers)
        apart, requests = f"probe-{number}", []
        for index, (*prompt, last) in enumerate(sequences):
            every, chosen = {"prompt_logprobs": 0}, {"logprob_token_ids": [last]}
            names = f"{apart}-{index}", f"{apart}-{index}-last"
            requests.append(self._scored(names[0], [*prompt, last], apart, every))
            requests.append(self._scored(names[1], prompt, self._salt(), chosen))
        with typed_errors():
            outputs = await asyncio.gather(*requests)
        if self._interrupted or weights != (self._version, self._loads):
            return None
        scores = [value for output in outputs[::2] for value in output.prompt_logprobs.logprobs]
        # A token that is sampled comes before the one that was asked for.
        sampled = [output.outputs[0].logprobs.logprobs[-1] for output in outputs[1::2]]
        return tuple(scores), tuple(sampled)

    async def _scored(
        self, request_id: str, prompt_ids: Sequence[int], salt: str, wanted: dict[str, Any]
    ) -> Any:
        """Return vLLM's output for a prompt, with what is `wanted` of it."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            **wanted, max_tokens=1, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = tokens_input(list(prompt_ids), cache_salt=salt)
        self._requests.add(request_id)
        try:
            async for output in self._engine.generate(prompt, parameters, request_id):
                last = output
        finally:
            self._requests.discard(request_id)
        return last

    async def _admitted(self) -> None:
        while not (self._admits.is_set() or self._interrupted):  # it may be paused again meanwhile
            await self._admits.wait()
        if self._engine is None:
            raise EngineDied("the engine was closed")

    async def _requested(
        self, prompt_ids: Sequence[int], parameters: Any, sampled: Sampled
    ) -> AsyncGenerator[Any, None]:
        """Run one request, which vLLM has before this generator first yields."""
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(prompt_ids), cache_salt=sampled.cache_salt)
        request_id = sampled.request_id
        self._requests.add(request_id)
        try:
            async with aclosing(self._engine.generate(prompt, parameters, request_id)) as outputs:
                async for output in outputs:
                    self._unstarted.discard(request_id)
                    yield output
        finally:
            self._requests.discard(request_id)
            self._unstarted.discard(request_id)
            self._recalled.discard(request_id)

    def parameters(self, sampling: SamplingParameters, **others: Any) -> Any:
        """Return vLLM's parameters of a request; `others` are such as change no probability."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        defaults = {
            "logprobs": 0,
            "stop": list(sampling.stop),
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": self._spec.config.skip_special_tokens,
            "output_kind": RequestOutputKind.DELTA,
            "stream_interval": sampling.max_new_tokens,  # the first token, then all others
        }
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=sampling.max_new_tokens,
            flat_logprobs=True,
            stop_token_ids=list(sampling.stop_ids),
            **{**defaults, **others},
        )

    @property
    def client(self) -> Any:
        """Own client of vLLM for the started engine; raises EngineDied once it is closed."""
        if self._engine is None:
            raise EngineDied("the engine was closed")
        return self._engine

    async def interrupt(self) -> None:
        self._interrupted = True
        self._admits.set()
        with typed_errors():
            if self._engine is not None:
                await self._engine.abort(list(self._requests))

    async def pause(self) -> None:
        """See `UpdatableEngine.pause`; takes back requests without a token."""
        self._admits.clear()
        # As `pause_generation`, without its fixed sleep of 20 ms and its multimodal cache.
        pausing = self._engine.engine_core.pause_scheduler_async(
            mode=PAUSE_MODES[self._spec.weight_sync.update_mode],
            clear_cache=self._spec.weight_sync.clear_cache,
        )
        with typed_errors():
            await self._answered(pausing)
            recalled, self._unstarted = self._unstarted, set()
            self._recalled |= recalled
            await self._engine.abort(recalled)

    async def prepare(self, weights: StagedWeights) -> None:
        """See `UpdatableEngine.prepare`; for models that `weight_sync.vllm.shadow` supports."""
        manifest = weights.manifest.to_json()
        self.prepared = None
        with typed_errors():
            if not await self._on_all_workers("prepare_weights", manifest):
                return
            wait, seconds = min(self._prepare_seconds, PREPARED_POLL_SECONDS), [0.0]
            while not all(seconds):
                await asyncio.sleep(wait)
                seconds = await self._answered(self._engine.collective_rpc("weights_prepared"))
                wait = PREPARED_POLL_SECONDS
        self.prepared, self._prepare_seconds = manifest, 1.1 * max(seconds)

    async def load(self, weights: StagedWeights, version: int) -> None:
        """See `UpdatableEngine.load`; prepared weights are exchanged, others are loaded."""
        manifest = weights.manifest.to_json()
        prepared, self.prepared = self.prepared, None
        with self._loading(f"version {version}"):
            exchanged = manifest == prepared and await self._on_all_workers(
                "exchange_weights", weights.manifest.version
            )
            if not exchanged:
                await self._answered(self._reload(manifest))
            await self._answered(self._engine.update_weight_version(str(version)))
        self._loads = self._loads + 1 if version == self._version else 0
        self._version = version

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        with self._loading(method):
            await self._answered(transfer(self._engine, method, payload))

    async def serve(self, version: int) -> None:
        with typed_errors():
            await self._answered(self._engine.update_weight_version(str(version)))
        self._version = version

    async def _on_all_workers(self, method: str, *arguments: Any) -> bool:
        """Call a method of the worker extension; return True if every worker returned True."""
        calling = self._engine.collective_rpc(method, args=arguments)
        return all(await self._answered(calling))

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of vLLM; raise EngineDied if its engine dies, as it then never answers."""
        answer = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({answer}, timeout=DEATH_POLL_SECONDS))[0]:
                if self._engine is None or self._engine.errored:
                    self._admits.set()  # requests that wait for the end of a pause fail too
                    raise EngineDied(died())
            return answer.result()
        finally:
            answer.cancel()

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        """Raise EngineDied for an engine that died, and LoadFailed for one that lives."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except Exception as error:
            if isinstance(error, (EngineDeadError, EngineDied)) or self._engine.errored:
                raise EngineDied(f"vLLM died while loading {what}: {error}") from error
            raise LoadFailed(f"vLLM could not load {what}: {error}") from error

    async def _reload(self, manifest: str) -> None:
        """Let vLLM load a version layer by layer."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"manifest": manifest})
        if self._load_failed:
            await self._engine.collective_rpc("abandon_weight_update")
        self._load_failed = True
        await self._engine.start_weight_update()
        await self._engine.update_weights(update)
        await self._engine.finish_weight_update()
        self._load_failed = False

    async def resume(self) -> None:
        with typed_errors():
            await self._answered(self._engine.resume_generation())
        self._admits.set()

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._admits.set()
            log = logging.getLogger("vllm")
            level = log.level
            log.setLevel(logging.CRITICAL)  # vLLM logs its own shutdown as a failure
            await asyncio.to_thread(engine.shutdown, timeout=SHUTDOWN_SECONDS)
            log.setLevel(level)
