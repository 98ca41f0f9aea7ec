"""Memory of each process of a run, from the sizes of its model. Pure.

A process needs what the largest of its phases does: of a learner loading, passes forward and
backward, and steps of the optimizer. Constants marked [E] are estimates for GPUs, where nothing was
measured; the others were measured on x86-64 without a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import (
    GIB,
    GRADIENT,
    MIB,
    MOMENTS,
    STEPPED,
    WEIGHT,
    reference_weight_bytes,
    teacher_score_bytes,
    version_bytes,
)
from deploy.planner.model_sizes import EngineSizes, ModelSizes, Sizes
from headway.roles import Role
from learner.config.learner import LearnerConfig
from learner.engine.gathering import BUCKET_ELEMENTS, live_elements, overlaps
from weight_sync.direct.publisher import sends_from_device
from weight_sync.vllm.device_memory import CHUNK_BYTES, stages_on_device

Parts = Mapping[str, float]
"""Bytes by what they hold."""

LEARNER_BASE, ENGINE_BASE, DRIVER_BASE = 590 * MIB, 1400 * MIB, 1200 * MIB
"""Python and libraries of a rank, of an actor with its engine's processes, and of driver, standby,
broker and broadcaster together."""
OWN_IMPORT = 130 * MIB
"""More of an engine that is no fork (`actors.engines.vllm_processes`), and so shares less."""
PACKED, NEXT = 1.65, 1.9
"""Weights of an engine on a CPU, for each of the model's: with copies packed for its kernels, and
those of the version that it loads beside them. oneDNN packs none in bfloat16 without AVX-512."""
GPU_BASE = 2 * GIB
"""[E] The libraries of CUDA in addition."""
CONTEXT = 1 * GIB
"""[E] CUDA context and communicators of a process on its GPU."""
FRAGMENTS, HEAP_FRAGMENTS = 0.1, 0.35
"""Share of a pass that an allocator holds and cannot use: torch's of a GPU [E], and the C library's
heap, in which the tensors of passes of several lengths lie; it grows over some ten batches."""
STEPPED_AT_ONCE = 1_000_000_000
"""Weights that the optimizer steps at a time under ZeRO 3."""
TRANSFERS = {"nccl": 4, "ipc": 2}
"""Copies of the largest tensor in buffers of vLLM's own transports; `nccl` fills two in turn."""
SENT = {"GPU": 40e9, "host": 20e9}
"""[E] Bytes a second that `nccl` sends from there: of a network of 400 Gb/s between nodes, of PCIe
to the learner's GPU and from it, in turn."""
ENGINE_WORK = 2 * GIB
"""[E] Activations and communicators of a worker of an engine."""
CUDA_GRAPHS = 1 * GIB
"""[E] What a worker captures for batches of many sizes; vLLM takes it from the KV cache."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, or an actor with the processes of its engine."""

    role: Role
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

    @property
    def all_resident(self) -> float:
        """Host memory of all of them together, as the system counts it."""
        return total(self.resident) + (self.count - 1) * total(self.host)

    @property
    def share(self) -> float:
        """Share of a GPU that it takes; 0 if it takes none, or whole ones."""
        return self.gpus if self.gpus < 1 else 0.0


def total(parts: Parts) -> float:
    """Return the sum of the parts."""
    return sum(parts.values())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 GPU" or "2 GPUs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def learner_rank(config: RunConfig, sizes: Sizes, card: float | None) -> Process:
    """Return the ranks, on GPUs of `card` bytes; the first has two versions in turn to publish."""
    learner, policy = config.learner, sizes.policy
    loaded = _weights(learner, policy)
    models = [policy] if sizes.critic is None else [policy, sizes.critic]
    held = _added([_states(learner, model) for model in models])
    step = {"step": sum(_step(learner, model.trained) for model in models)}
    stepped: Parts = {}
    if learner.offload_optimizer:
        offloaded = [_offloaded(learner, model) for model in models]
        held, stepped = (_added(parts) for parts in zip(*offloaded, strict=True))
        step = {}
    if learner.holds_reference:
        held["reference"] = loaded * reference_weight_bytes(learner) / WEIGHT[learner.dtype]
    scores = teacher_score_bytes(config, sizes.longest, sizes.served.vocabulary)
    if sizes.teachers:
        held["teachers"] = sum(_weights(learner, teacher) for teacher in sizes.teachers)
        held["scores of teachers"] = scores
    training = held | _larger(step, _passing(learner, models))
    captured = _added([_captured(learner, model) for model in models])
    captured |= {"batch with scores": 2 * scores} if scores else {}  # whole, and a minibatch
    version = version_bytes(config, policy.parameters, policy.trained)
    first = {
        "versions": (3 if config.weight_sync.codec == "delta" else 2) * float(version),
        "checkpoint of the model": captured.pop("checkpoint of the model"),
    }
    if learner.kl is not None and learner.kl.refresh_every is not None:
        first["checkpoint of the reference"] = float(
            reference_weight_bytes(learner) * policy.parameters
        )
    if not learner.gpus:
        host = {"libraries": LEARNER_BASE, **training, **stepped, **captured}
        return Process(Role.LEARNER, learner.ranks, host, {}, 0, first=first)
    loading = {"weights as loaded": loaded}
    host = {"libraries": LEARNER_BASE + GPU_BASE, **_larger(loading, stepped), **captured}
    device: dict[str, float] = {"CUDA": CONTEXT}
    if not config.weight_sync.staged:
        transfers = TRANSFERS[config.weight_sync.transport]
        copies = transfers * policy.largest_tensor / policy.parameters
        device["transfer"] = max(float(GIB), copies * version)
    device |= _larger(training, loading)
    note = ""
    if config.weight_sync.transport == "nccl":
        on_device, note = _sending(float(version), total(device), card)
        if on_device:
            first["versions"] = float(version)  # the first one, before a step has shown the room
    return Process(Role.LEARNER, learner.ranks, host, device, learner.gpus, first=first, note=note)


def _sending(version: float, needed: float, card: float | None) -> tuple[bool, str]:
    """Return True if `nccl` sends from a GPU that steps need so much of, and a note with pauses."""
    on_device = card is not None and sends_from_device(version, card - needed, card)
    ways = list(SENT) if on_device else list(reversed(SENT))
    here, other = (f"{version / SENT[way]:.2g} s" for way in ways)
    note = f"nccl sends from the {ways[0]}: engines stand still for about {here} an update"
    return on_device, f"{note} ({other} from the {ways[1]})"


def _added(parts: Sequence[Parts]) -> dict[str, float]:
    """Add up parts by their names."""
    return {name: sum(some[name] for some in parts) for name in parts[0]}


def _larger(first: Parts, second: Parts) -> dict[str, float]:
    return dict(first if total(first) > total(second) else second)


def _weights(learner: LearnerConfig, model: ModelSizes) -> float:
    """Return the bytes of a rank's part of the weights of a model, and of its node's copy."""
    weights = float(WEIGHT[learner.dtype] * model.parameters)
    if learner.zero_stage < 3:
        return weights
    of_node = 0.0 if learner.ranks_of_node is None else weights / learner.ranks_of_node
    return weights / learner.ranks + of_node


def _states(learner: LearnerConfig, model: ModelSizes) -> dict[str, float]:
    """Return what a rank holds of a model from step to step, by DeepSpeed's stage."""
    stage, share = learner.zero_stage, model.trained / learner.ranks
    return {
        "weights": _weights(learner, model),
        "gradients": GRADIENT * float(share if stage >= 2 else model.trained),
        **({"master weights": STEPPED * share} if stage else {}),
        "optimizer": MOMENTS * float(share if stage else model.trained),
    }


def _offloaded(learner: LearnerConfig, model: ModelSizes) -> tuple[Parts, Parts]:
    """Return what a rank holds of a model on its device, and on the host, where it is stepped.

    Below stage 3 gradients are summed on the device and copied, through a buffer for a tensor on
    either side, to those that the optimizer reads; it writes new weights in their dtype.
    """
    device = _states(learner, model)
    host = {"master weights": device.pop("master weights"), "optimizer": device.pop("optimizer")}
    host["gradients to step by"] = _step(learner, model.trained)
    if learner.zero_stage == 3:
        return device, {**host, "gradients": device.pop("gradients")}
    itemsize = WEIGHT[learner.dtype]
    buffer = {"buffer of a gradient": float(itemsize * model.largest_tensor)}
    host["weights as stepped"] = itemsize * model.trained / learner.ranks
    return device | buffer, host | buffer


def _captured(learner: LearnerConfig, model: ModelSizes) -> Parts:
    """Return the host memory that checkpoints are written from; the model's is of rank 0 alone."""
    weights = WEIGHT[learner.dtype] * float(model.trained if learner.lora else model.parameters)
    if learner.zero_stage:
        own = (STEPPED + MOMENTS) * model.trained / learner.ranks
        return {"checkpoint": own, "checkpoint of the model": weights}
    # without an adapter, those that are stepped are the model's
    states = (STEPPED * bool(learner.lora) + MOMENTS) * model.trained
    return {"checkpoint": 0.0, "checkpoint of the model": weights + states}


def _step(learner: LearnerConfig, trained: int) -> float:
    """Return the bytes of gradients, gathered into one tensor, that a step of ZeRO begins with."""
    if not learner.zero_stage:
        return 0.0
    share = trained / learner.ranks
    return GRADIENT * (min(share, STEPPED_AT_ONCE) if learner.zero_stage == 3 else share)


def _passing(learner: LearnerConfig, models: Sequence[ModelSizes]) -> Parts:
    """Return what a pass forward and backward needs, of the model that needs more."""
    model = max(models, key=lambda model: model.activations + model.passing)
    parts: dict[str, float] = {"activations": model.activations, "head, passing": model.passing}
    parts |= _backward(learner, model)
    fragments = FRAGMENTS if learner.gpus else HEAP_FRAGMENTS
    return parts | {"fragments": fragments * total(parts)}


def _backward(learner: LearnerConfig, model: ModelSizes) -> Parts:
    """Return what DeepSpeed needs in a backward pass beside activations."""
    stage, itemsize = learner.zero_stage, WEIGHT[learner.dtype]
    cast = float(GRADIENT) if itemsize < GRADIENT else 0.0
    summed = cast if learner.ranks > 1 else 0.0  # in float32
    parts = {}
    if stage:
        size = {
            1: GRADIENT + (itemsize if cast else 0.0),  # in float32, and as they come
            2: 2 * itemsize + summed,  # twice: as they come, and joined
            3: itemsize + (2 * summed or itemsize + cast),  # twice: as they are, and by ranks
        }[stage]
        parts["bucket"] = size * min(model.trained, max(BUCKET_ELEMENTS, model.largest_tensor))
        if overlaps(stage, learner.ranks, model.trained):
            parts["next bucket"] = float(itemsize * BUCKET_ELEMENTS)
    if stage == 3 and learner.ranks > 1:
        gathered = live_elements(model.parameters) + model.largest_layer
        parts["gathered weights"] = float(itemsize * gathered)
    return parts


def engine(
    config: RunConfig, sizes: ModelSizes, served: EngineSizes, card: float | None
) -> Process:
    """Return an actor with its engine; `card` is the memory of a GPU in bytes, if it is known."""
    actors, staged = config.actors, config.weight_sync.staged
    weights = float(sizes.parameters * served.itemsize)
    version = staged * float(version_bytes(config, sizes.parameters, sizes.trained))
    workers = actors.tensor_parallel_size
    on_gpus = OWN_IMPORT + GPU_BASE * workers if actors.gpus else 0
    host = {"libraries": float(ENGINE_BASE + on_gpus)}
    if config.weight_sync.codec == "delta":
        host["base of deltas"] = version
    mapped = {"staged version": version}
    if config.learner.lora is not None and staged:
        host["merging"] = 8.0 * sizes.largest_adapted  # the weight, and what it is merged to
        mapped["model folder"] = weights
    if not actors.gpus:
        mapped["staged version"] *= 2  # in the actor, and in the engine
        packed, following = (PACKED, NEXT) if served.packed else (1.0, 1.0)
        host |= {"weights": packed * weights, "next version": following * weights}
        host["KV cache"] = float(served.cpu_cache)
        return Process(Role.ACTOR, actors.count, host, {}, 0, mapped=mapped)
    rollout = served.kv_token * served.context / min(workers, served.kv_heads)
    logits = 12.0 * actors.max_concurrent_rollouts * served.vocabulary  # gathered on each worker
    device = {"weights": weights / workers, "work": ENGINE_WORK + logits}
    if actors.enforce_eager is not True:  # "auto" captures on GPUs
        device["CUDA graphs"] = float(CUDA_GRAPHS)
    least = device | {"KV cache of one rollout": rollout}
    limit = None if card is None else actors.gpu_memory_share * card
    cache, notes = rollout, []
    if limit is not None:
        cache = max(rollout, limit - total(device))
        fit = int(cache / rollout)
        note = f"KV cache for {counted(fit, 'rollout')} of {served.context:,} tokens"
        if fit < actors.max_concurrent_rollouts:
            note += f"; actors.max_concurrent_rollouts = {actors.max_concurrent_rollouts:,}"
        notes.append(note)
    if staged:
        host["chunks of the next version"] = 2.0 * CHUNK_BYTES * workers
        left = 0.0 if card is None or limit is None else card - limit - CONTEXT
        if stages_on_device(weights / workers, left, shared=actors.gpus < 1):
            device["staged weights"] = weights / workers
        else:
            host["staged weights"] = weights
            notes.append("updates come from host memory")
    device |= {"KV cache": cache, "CUDA": float(CONTEXT)}
    note, gpus = "; ".join(notes), actors.gpus
    return Process(
        Role.ACTOR, actors.count, host, device, gpus,
        mapped=mapped, note=note, limit=limit, least=least,
    )  # fmt: skip
