"""Generates with vLLM. The only file of the package that imports it, and not before `start`.

One engine is one AsyncLLM with its worker processes. Weights come through the transfer backend
"headway" (`weight_sync.vllm.plugin`), log-probabilities are those of the distribution that was
sampled from, and the version of every token is the one that vLLM stamped on it.
"""

import asyncio
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from actors.engines.model_folder import weight_shapes
from actors.engines.protocol import Generation, SamplingParameters
from actors.errors import ActorsError, EngineDied, EngineStale, InputError
from queues.records import FinishReason
from queues.runtime.cpu_affinity import bind_process, parse_cores
from weight_sync.errors import LoadFailed
from weight_sync.manifest import Signature
from weight_sync.receive.staging import StagedWeights
from weight_sync.vllm.transfer import BACKEND, transfer

WARM_UP_TOKENS = 8
CPU_BLOCK_TOKENS = 32
"""Of the KV cache, which keeps whole blocks: of vLLM's 128 a short turn would fill none."""

PREPARED_POLL_SECONDS = 0.01

SHUTDOWN_SECONDS = 20.0
"""What vLLM's processes get to end by themselves before they are killed."""


class VllmEngine:
    """A vLLM engine whose weights can be replaced in flight (a `RolloutEngine`).

    Args:
        model_path: Local folder or hub name; its weights give the shapes and the first values.
        dtype: What the engine computes in.
        float32_head: Form logits in float32, whatever `dtype` is.
        max_model_len: Longest prompt plus continuation, in tokens.
        max_num_seqs: Requests that run at once; the others queue.
        cores: CPU cores, as "0" or "2-5"; None leaves the binding to vLLM.
        kv_cache_gib: KV cache on a CPU, rounded up to whole GiB; None takes vLLM's default.
        gpu_memory_utilization: Share of a GPU's memory for weights and KV cache.
        tensor_parallel_size: GPUs, or CPU sockets, that share the model.
        enforce_eager: No compilation; right on a CPU and for tiny models.
        seed: Of sampling without a seed of its own.
        update_mode: Freeze requests for a swap, or let the running ones finish first.
        clear_cache: Recompute the KV cache after a swap instead of keeping it.
        weight_backend: How weights come: BACKEND loads them, for the others see `transfer`.
        initial_version: Version of the weights in `model_path`; None leaves the engine STALE.
        counts: vLLM counts what it does, in `prometheus_client`'s registry of this process.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        float32_head: bool = False,
        max_model_len: int,
        max_num_seqs: int = 64,
        cores: str | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = True,
        seed: int = 0,
        update_mode: Literal["in_flight", "between_requests"] = "in_flight",
        clear_cache: bool = False,
        weight_backend: str = BACKEND,
        initial_version: int | None = None,
        counts: bool = False,
    ) -> None:
        self._model_path = model_path
        self._cores = cores
        self._kv_cache_gib = kv_cache_gib
        self._pause_mode = {"in_flight": "keep", "between_requests": "wait"}[update_mode]
        self._clear_cache = clear_cache
        self._weight_backend = weight_backend
        self._version = initial_version
        self._counts = counts
        self._arguments = {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
            "seed": seed,
        }
        if tensor_parallel_size > 1:  # in a placement group vLLM would ask Ray for its workers
            self._arguments["distributed_executor_backend"] = "mp"
        if weight_backend == BACKEND:
            self._arguments["worker_extension_cls"] = "weight_sync.vllm.plugin.PreparesWeights"
        if float32_head:
            self._arguments["hf_overrides"] = {"head_dtype": "float32"}
        self._engine: Any = None
        self._admits = asyncio.Event()
        """Cleared while the engine is paused: requests wait here and not in vLLM's queue."""
        self._admits.set()
        self._unstarted: set[str] = set()
        """Requests without a token whose salt names the version that they were admitted under."""
        self._recalled: set[str] = set()
        """Those of them that a pause took back; they are admitted again after it."""
        self._requests: set[str] = set()
        """All that vLLM has."""
        self._interrupted = False
        self._prepared: str | None = None
        """The manifest that vLLM's workers have made ready."""

    async def start(self) -> None:
        """See `RolloutEngine.start`; takes half a minute, and generates a little to warm up.

        Raises:
            InputError: vLLM cannot load the model with these settings; says why.
        """
        arguments = self.engine_arguments()
        from vllm import AsyncEngineArgs
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, OSError) as error:
            raise InputError(f"vLLM cannot serve {self._model_path!r}: {error}") from error
        except RuntimeError as error:
            raise EngineDied(f"vLLM did not start for {self._model_path!r}: {error}") from error
        try:
            with _typed_errors():
                if self._weight_backend == BACKEND:
                    await self._engine.init_weight_transfer_engine(WeightTransferInitRequest())
                label = -1 if self._version is None else self._version
                await self._engine.update_weight_version(str(label))
                sampling = SamplingParameters(temperature=1.0, max_new_tokens=WARM_UP_TOKENS)
                await self._sample("warm-up", [0], sampling, "warm-up")
        except BaseException:
            await self.close()
            raise

    def engine_arguments(self) -> dict[str, Any]:
        """Everything that vLLM's engine is made with, with this process and its environment ready.

        Raises:
            InputError: This machine does not have the cores.
        """
        self._set_environment()
        from vllm.platforms import current_platform

        arguments = dict(self._arguments)
        if current_platform.is_cpu():
            arguments["block_size"] = CPU_BLOCK_TOKENS
        if self._cores is not None and arguments["tensor_parallel_size"] == 1:
            arguments |= _in_one_process(parse_cores(self._cores))
        from vllm.config.weight_transfer import WeightTransferConfig

        return {
            **arguments,
            "weight_transfer_config": WeightTransferConfig(backend=self._weight_backend),
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": not self._counts,
        }

    def _set_environment(self) -> None:
        """What vLLM reads when it is imported and when it starts its processes."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if self._cores is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = self._cores
        if self._kv_cache_gib is not None:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(self._kv_cache_gib))

    def inventory(self) -> Signature:
        """Names and shapes of the weights in the model folder; any dtype is cast when loaded."""
        shapes = weight_shapes(self._model_path)
        return {name: (None, shape) for name, shape in shapes.items()}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`."""
        if self._version is None:
            raise EngineStale(f"{request_id}: no policy version has been loaded yet")
        with _typed_errors():
            if cache_salt is not None:
                await self._admitted()
                return await self._sample(request_id, prompt_ids, sampling, cache_salt)
            while True:
                await self._admitted()
                self._unstarted.add(request_id)
                try:
                    done = await self._sample(request_id, prompt_ids, sampling, str(self._version))
                    if (
                        request_id not in self._recalled
                        or done.finish_reason is not FinishReason.ABORTED
                    ):
                        return done
                finally:
                    self._unstarted.discard(request_id)
                    self._recalled.discard(request_id)

    async def _admitted(self) -> None:
        """Returns while the engine is not paused."""
        while not (self._admits.is_set() or self._interrupted):  # it may be paused again meanwhile
            await self._admits.wait()
        if self._engine is None:
            raise EngineDied("the engine was closed")

    async def _sample(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParameters, salt: str
    ) -> Generation:
        """One request of vLLM, which has it before anything else can run here."""
        if self._interrupted:
            return Generation(
                token_ids=[], logprobs=[], versions=[], finish_reason=FinishReason.ABORTED,
                cache_salt=salt,
            )  # fmt: skip
        self._requests.add(request_id)
        try:
            return await self._stream(request_id, prompt_ids, sampling, salt)
        finally:
            self._requests.discard(request_id)

    async def _stream(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParameters, salt: str
    ) -> Generation:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        stream = self._engine.generate(
            tokens_input(list(prompt_ids), cache_salt=salt),
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                max_tokens=sampling.max_new_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                stream_interval=sampling.max_new_tokens,  # the first token, then all others
            ),
            request_id,
        )
        token_ids: list[int] = []
        logprobs: list[float] = []
        async for output in stream:
            self._unstarted.discard(request_id)
            completion = output.outputs[0]
            token_ids += completion.token_ids
            logprobs += completion.logprobs.logprobs
        versions: list[int] = []
        for span in completion.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != len(token_ids):
            raise ActorsError(
                f"{request_id}: vLLM stamped {len(versions)} of {len(token_ids)} tokens"
            )
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=_FINISH_REASONS.get(completion.finish_reason, FinishReason.ERROR),
            cache_salt=salt,
        )

    async def interrupt(self) -> None:
        """See `RolloutEngine.interrupt`."""
        self._interrupted = True
        self._admits.set()
        with _typed_errors():
            if self._engine is not None:
                await self._engine.abort(list(self._requests))

    async def pause(self) -> None:
        """See `UpdatableEngine.pause`; takes requests back that have not begun."""
        self._admits.clear()
        with _typed_errors():
            # As `pause_generation`, less its fixed sleep of 20 ms and a cache that text has not.
            await self._engine.engine_core.pause_scheduler_async(
                mode=self._pause_mode, clear_cache=self._clear_cache
            )
            recalled, self._unstarted = self._unstarted, set()
            self._recalled |= recalled
            await self._engine.abort(recalled)

    async def prepare(self, weights: StagedWeights) -> None:
        """See `UpdatableEngine.prepare`; the worker maps the staged memory, nothing is copied here.

        Only on a CPU, and for models that `weight_sync.vllm.shadow` knows.
        """
        manifest = weights.manifest.to_json()
        self._prepared = None
        with _typed_errors():
            begun = await self._engine.collective_rpc("prepare_weights", args=(manifest,))
            if not all(begun):
                return
            while True:
                if all(await self._engine.collective_rpc("weights_prepared")):
                    break
                await asyncio.sleep(PREPARED_POLL_SECONDS)
        self._prepared = manifest

    async def load(self, weights: StagedWeights, version: int) -> None:
        """See `UpdatableEngine.load`: what was prepared changes hands, other weights are loaded."""
        manifest = weights.manifest.to_json()
        prepared, self._prepared = self._prepared, None
        with self._loading(f"version {version}"):
            if manifest != prepared or not await self._exchanged(weights.manifest.version):
                await self._reload(manifest)
            await self._engine.update_weight_version(str(version))
        self._version = version

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """See `DirectEngine.transfer`."""
        with self._loading(method):
            await transfer(self._engine, method, payload)

    async def serve(self, version: int) -> None:
        """See `DirectEngine.serve`."""
        with _typed_errors():
            await self._engine.update_weight_version(str(version))
        self._version = version

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        """Tells an engine that died from one that only has no whole weights."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineDied(f"vLLM died while loading {what}") from error
        except Exception as error:
            if self._engine.errored:
                raise EngineDied(f"vLLM died while loading {what}: {error}") from error
            raise LoadFailed(f"vLLM could not load {what}: {error}") from error

    async def _exchanged(self, version: int) -> bool:
        """Whether every worker has put what it prepared in its place."""
        return all(await self._engine.collective_rpc("exchange_weights", args=(version,)))

    async def _reload(self, manifest: str) -> None:
        """Has vLLM load a version layer by layer."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        await self._engine.update_weights(
            WeightTransferUpdateRequest(update_info={"manifest": manifest})
        )
        await self._engine.finish_weight_update()

    async def resume(self) -> None:
        """See `UpdatableEngine.resume`."""
        with _typed_errors():
            await self._engine.resume_generation()
        self._admits.set()

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._admits.set()
            log = logging.getLogger("vllm")
            level = log.level
            log.setLevel(logging.CRITICAL)  # it calls its own shutdown an engine failure
            await asyncio.to_thread(engine.shutdown, timeout=SHUTDOWN_SECONDS)
            log.setLevel(level)


def _in_one_process(cores: list[int]) -> dict[str, Any]:
    """Binds this process and the engine's to cores; what makes vLLM run its model in the latter.

    On a CPU vLLM would start a third process for the model, ten seconds later, and bind that alone.
    OpenMP reads these variables when a process begins.

    Returns:
        Arguments of the engine; none where the model runs on a GPU.

    Raises:
        InputError: This machine does not have the cores.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    bind_process(cores, "actors.cores")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(len(cores)),
        OMP_PLACES="{" + ",".join(map(str, cores)) + "}",
        OMP_PROC_BIND="true",
    )
    return {"distributed_executor_backend": "uni"}


_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns vLLM's own errors into ours where they leave the adapter."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied("a process of the vLLM engine is gone") from error
    except (VLLMClientError, ValueError) as error:
        raise InputError(f"vLLM refused a request: {error}") from error
    except EngineGenerateError as error:
        raise ActorsError(f"vLLM failed a request: {error.__cause__ or error}") from error
