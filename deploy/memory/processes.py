"""Memory of each process of a run, from the sizes of its model. Pure.

A process needs what the largest of its phases does: of a learner loading, passes forward and
backward, and steps of the optimizer. Constants marked [E] are estimates for GPUs, where nothing was
measured; the others were measured on x86-64 without a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.config.run_config import RunConfig
from learner.config.learner import LearnerConfig

MIB, GIB = 2**20, 2**30
Parts = Mapping[str, float]
"""Bytes by what they hold."""

LEARNER_BASE, ENGINE_BASE, DRIVER_BASE = 590 * MIB, 1530 * MIB, 900 * MIB
"""Python and libraries of a rank, of an actor with its engine's processes, and of driver, broker
and broadcaster together."""
PACKED, NEXT = 1.65, 1.9
"""Weights of an engine on a CPU, for each of the model's: with copies packed for its kernels, and
those of the version that it loads beside them."""
GPU_BASE = 2 * GIB
"""[E] The libraries of CUDA in addition."""
CONTEXT = 1 * GIB
"""[E] CUDA context and communicators of a process on its GPU."""
FRAGMENTS, HEAP_FRAGMENTS = 0.1, 0.35
"""Share of a pass that an allocator holds and cannot use: torch's of a GPU [E], and the C library's
heap, in which the tensors of passes of several lengths lie; it grows over some ten batches."""
BUCKET = 100_000_000
"""Gradients in DeepSpeed's bucket at most, as in `learner.engine.deepspeed`, but for a tensor that
is larger."""
GATHERED = 1_000_000_000
"""Weights that ZeRO 3 gathers beside a layer, at most a twentieth of the model, and that it
steps at a time."""
TRANSFERS = {"nccl": 4, "ipc": 2}
"""Copies of the largest tensor in the buffers of vLLM's own transports: `nccl` fills two in turn,
each with what it joins."""
SPARE_BYTES = 1 * GIB
"""Memory of a GPU that is left free beside staged weights."""
ENGINE_WORK = 2 * GIB
"""[E] Activations, CUDA graphs and communicators of a worker of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model and of one microbatch through it."""

    parameters: int
    """Weights, tied ones once, and the factors of an adapter."""
    trained: int
    """Those that have gradients."""
    largest_layer: int
    """Weights of the largest transformer block."""
    largest_tensor: int
    """Weights of the largest tensor."""
    largest_adapted: int = 0
    """Weights of the largest tensor that an adapter changes."""
    activations: int
    """Bytes that autograd keeps from the forward to the backward pass."""
    passing: int
    """Bytes beyond them when a pass needs the most: logits and gradients of the head, and what
    operations need for a moment."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, or an actor with the processes of its engine."""

    role: str
    count: int
    host: Parts
    """Bytes of host memory that each of them has for itself."""
    device: Parts
    """Bytes of each of its GPUs; empty without."""
    gpus: float
    """GPUs that it takes, below 1 a share of one."""
    first: Parts = field(default_factory=dict)
    """Bytes that only the first one has in addition."""
    mapped: Parts = field(default_factory=dict)
    """Bytes that it maps: of published versions, which are counted once for its node, and of the
    model folder that adapters are merged into, which the system can drop."""
    note: str = ""
    limit: float | None = None
    """Bytes of each of its GPUs that its engine may take for weights, work and KV cache."""
    least: Parts = field(default_factory=dict)
    """Bytes of a GPU that count for the limit when the KV cache holds a single rollout."""

    @property
    def resident(self) -> Parts:
        """Host memory of the first one, as the system counts it."""
        return {**self.host, **self.first, **self.mapped}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Sizes that the memory of an engine depends on, beside its weights."""

    itemsize: int
    """Bytes of a weight that it serves."""
    kv_token: int
    """Bytes of KV cache of one token, of all heads."""
    kv_heads: int
    """Heads with keys and values of their own, of which a worker holds one at least."""
    workers: tuple[int, ...]
    """Values of `actors.tensor_parallel_size` by which its weights can be divided."""
    vocabulary: int
    context: int
    """Longest rollout in tokens."""
    cpu_cache: int
    """Bytes of the KV cache of an engine on a CPU."""


def total(parts: Parts) -> float:
    """Return the sum of the parts."""
    return sum(parts.values())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 GPU" or "2 GPUs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def learner_rank(config: RunConfig, sizes: ModelSizes, critic: ModelSizes | None) -> Process:
    """Return the ranks; the first publishes, and has two versions in turn for that.

    What a checkpoint has is copied to host memory, and written while training goes on.
    """
    learner = config.learner
    gpu, itemsize = learner.gpus > 0, 2 if learner.dtype == "bfloat16" else 4
    shares = learner.ranks if learner.zero_stage == 3 else 1
    models = [sizes] if critic is None else [sizes, critic]
    held, step = (
        _added([_states(learner, model) for model in models]),
        {"step": sum(_step(learner, model.trained) for model in models)},
    )
    stepped: Parts = {}
    if learner.offload_optimizer:
        stepped = {part: size for part, size in held.items() if part != "weights"} | step
        held, step = {"weights": held["weights"]}, {}
    if learner.holds_reference:
        held["reference"] = itemsize * sizes.parameters / shares
    larger = max(models, key=lambda model: model.activations + model.passing)
    passing: dict[str, float] = {
        "activations": larger.activations,
        "head, passing": larger.passing,
        **_backward(learner, larger),
    }
    passing["fragments"] = (FRAGMENTS if gpu else HEAP_FRAGMENTS) * total(passing)
    training = held | _larger(step, passing)
    loading = {"weights as loaded": itemsize * sizes.parameters / shares}
    kept = 3 if config.weight_sync.codec == "delta" else 2
    copied = [_captured(learner, model) for model in models]
    captured: Parts = {"checkpoint": sum(own for own, _ in copied)}
    copies = {
        "versions": kept * wire_bytes(config, sizes),
        "checkpoint of the model": sum(first for _, first in copied),
    }
    if learner.kl is not None and learner.kl.refresh_every is not None:
        copies["checkpoint of the reference"] = float(itemsize * sizes.parameters)
    staged = config.weight_sync.staged
    transferred = TRANSFERS.get(config.weight_sync.transport, 0) * wire_bytes(config, sizes)
    transferred *= sizes.largest_tensor / sizes.parameters
    if not gpu:
        host = {"libraries": LEARNER_BASE, **training, **stepped, **captured}
        return Process("learner", learner.ranks, host, {}, 0, first=copies)
    return Process(
        "learner",
        learner.ranks,
        {"libraries": LEARNER_BASE + GPU_BASE, **_larger(loading, stepped), **captured},
        {
            "CUDA": CONTEXT,
            **({} if staged else {"transfer": max(float(GIB), transferred)}),
            **_larger(training, loading),
        },
        learner.gpus,
        first=copies,
    )


def _added(parts: Sequence[Parts]) -> dict[str, float]:
    """Add up parts by their names."""
    return {name: sum(some[name] for some in parts) for name in parts[0]}


def _larger(first: Parts, second: Parts) -> dict[str, float]:
    return dict(first if total(first) > total(second) else second)


def wire_bytes(config: RunConfig, sizes: ModelSizes) -> float:
    """Return the bytes of a published version."""
    half = "bfloat16" in (config.weight_sync.wire_dtype, config.learner.dtype)
    alone = config.learner.lora is not None and config.weight_sync.staged
    return (sizes.trained if alone else sizes.parameters) * (2.0 if half else 4.0)


def _states(learner: LearnerConfig, model: ModelSizes) -> Parts:
    """Return what a rank holds of a model from step to step, by DeepSpeed's stage."""
    stage, itemsize = learner.zero_stage, 2 if learner.dtype == "bfloat16" else 4
    share = model.trained / learner.ranks
    moments = 8.0 * (share if stage else model.trained)
    return {
        "weights": itemsize * model.parameters / (learner.ranks if stage == 3 else 1),
        "gradients": 4.0 * (share if stage >= 2 else model.trained),
        **({"master weights": 4.0 * share} if stage else {}),
        "optimizer": moments,
    }


def _captured(learner: LearnerConfig, model: ModelSizes) -> tuple[float, float]:
    """Return the bytes of the copy that checkpoints are written from, in host memory.

    They are those of what every rank steps, and those that the first rank has in addition.
    """
    itemsize = 2 if learner.dtype == "bfloat16" else 4
    weights = itemsize * float(model.trained if learner.lora else model.parameters)
    if learner.zero_stage:
        return 12.0 * model.trained / learner.ranks, weights
    stepped = itemsize * model.trained if learner.lora else 0  # else they are the model's
    return 0.0, weights + stepped + 8.0 * model.trained


def _step(learner: LearnerConfig, trained: int) -> float:
    """Return the bytes of gradients, gathered into one tensor, that a step of ZeRO begins with."""
    if not learner.zero_stage:
        return 0.0
    share = trained / learner.ranks
    return 4.0 * (min(share, GATHERED) if learner.zero_stage == 3 else share)


def _backward(learner: LearnerConfig, model: ModelSizes) -> Parts:
    """Return what DeepSpeed needs in a backward pass beside activations."""
    stage, itemsize = learner.zero_stage, 2 if learner.dtype == "bfloat16" else 4
    cast = 4.0 if itemsize < 4 else 0.0
    summed = cast if learner.ranks > 1 else 0.0  # in float32
    parts = {}
    if stage:
        size = {
            1: 4.0 + (itemsize if cast else 0.0),  # in float32, and as they come
            2: 2 * itemsize + summed,  # twice: as they come, and joined
            3: itemsize + (2 * summed or itemsize + cast),  # twice: as they are, and by ranks
        }[stage]
        parts["bucket"] = size * min(model.trained, max(BUCKET, model.largest_tensor))
    if stage == 3 and learner.ranks > 1:
        gathered = min(GATHERED, model.parameters // 20) + model.largest_layer
        parts["gathered weights"] = float(itemsize * gathered)
    return parts


def engine(
    config: RunConfig, sizes: ModelSizes, served: EngineSizes, card: float | None
) -> Process:
    """Return an actor with its engine; `card` is the memory of a GPU in bytes, if it is known."""
    actors = config.actors
    weights = float(sizes.parameters * served.itemsize)
    staged = wire_bytes(config, sizes) if config.weight_sync.staged else 0.0
    base = {"base of deltas": 2 * staged} if config.weight_sync.codec == "delta" else {}
    alone = config.learner.lora is not None and config.weight_sync.staged
    libraries = ENGINE_BASE + (GPU_BASE * actors.tensor_parallel_size if actors.gpus else 0)
    host, mapped = {"libraries": float(libraries), **base}, {"staged version": staged}
    if alone:  # two in float32: the weight, and what it is merged to
        host["merging"], mapped["model folder"] = 8.0 * sizes.largest_adapted, weights
    if not actors.gpus:
        mapped["staged version"] *= 2  # in the actor, and in the engine
        host |= {"weights": PACKED * weights, "next version": NEXT * weights}
        host["KV cache"] = float(served.cpu_cache)
        return Process("actor", actors.count, host, {}, 0, mapped=mapped)
    workers = actors.tensor_parallel_size
    rollout = served.kv_token * served.context / min(workers, served.kv_heads)
    logits = 12.0 * actors.max_concurrent_rollouts * served.vocabulary  # gathered on each worker
    device = {"weights": weights / workers, "work": ENGINE_WORK + logits}
    least = device | {"KV cache of one rollout": rollout}
    limit = None if card is None else actors.gpu_memory_share * card
    left, notes = 0.0 if card is None or limit is None else card - limit - CONTEXT, []
    if config.weight_sync.staged:
        host["next version"] = weights
        # As `weight_sync.vllm.device_memory` does, which others of the GPU may forestall.
        if actors.gpus >= 1 and left > weights / workers + SPARE_BYTES:
            device["staged weights"] = weights / workers
        else:
            host["staged weights"] = weights
            notes.append("updates come from host memory")
    cache = rollout
    if limit is not None:
        own = device["weights"] + device["work"]
        cache = max(rollout, limit - own)
        fit = int(cache / rollout)
        note = f"KV cache for {counted(fit, 'rollout')} of {served.context:,} tokens"
        if fit < actors.max_concurrent_rollouts:
            note += f"; actors.max_concurrent_rollouts = {actors.max_concurrent_rollouts:,}"
        notes.insert(0, note)
    device |= {"KV cache": cache, "CUDA": float(CONTEXT)}
    return Process(
        "actor",
        actors.count,
        host,
        device,
        actors.gpus,
        mapped=mapped,
        note="; ".join(notes),
        limit=limit,
        least=least,
    )
