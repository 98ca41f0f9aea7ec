"""The state of DeepSpeed's optimizer by trained parameter, for any ZeRO stage and ranks.

DeepSpeed flattens the parameters of a group and cuts the result into one partition for each rank:
across parameters at stages 1 and 2, each parameter by itself at stage 3. Stage 0 has no partitions.
Its own checkpoints are pickles of partitions, which only as many ranks can load at the same stage;
its converter to universal ones knows neither stage 0 nor Muon.

    PARAMETER/weight        the float32 weights that are stepped
    PARAMETER/step          number of steps
    PARAMETER/exp_avg, …    whatever else the optimizer holds for each element
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.engine.tensor_parts import Part, PartReader
from learner.model.lora import EXACT

WEIGHT, STEP = "weight", "step"
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True)
class Shard:
    """The run of elements of a parameter that this rank steps."""

    name: str
    parameter: Any
    size: int
    """Elements of the whole parameter."""
    start: int
    """The first of the run in the flattened parameter."""
    count: int
    """Elements of the run, at least 1."""
    flat: Tensor  # the optimizer's own parameter, in float32, which has the run
    offset: int
    """Place of the run in `flat`."""
    momentum: tuple[int, int] | None = None
    """Place of the whole parameter in the momentum of `flat`, and elements of that, where it is not
    laid out as `flat`."""

    @property
    def weight(self) -> Tensor:
        """The run of weights, [count], a view."""
        return self.flat.detach().view(-1)[self.offset : self.offset + self.count]


def shards_of(engine: Any) -> Iterator[Shard]:
    """Yield what this rank of a DeepSpeed engine steps of each parameter."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    momentum = _momentum_places(zero) if stage in (1, 2) else {}
    for name, parameter in _trained(engine):
        size = parameter.ds_numel if stage == 3 else parameter.numel()
        start, count, flat, offset = 0, size, parameter, 0
        if stage == 3:
            group, offset, width = zero.grad_position[zero.get_param_id(parameter)]
            start = engine.global_rank * width
            count, flat = min(width, size - start), zero.fp32_partitioned_groups_flat[group]
        elif stage and (fragment := parameter._hp_mapping) is None:
            count = 0
        elif stage:
            start, count = fragment.lp_fragment_address.start, fragment.lp_fragment_address.numel
            offset = fragment.hp_fragment_address.start
            flat = zero.optimizer.param_groups[fragment.param_group_index]["params"][0]
        if count > 0:
            places = momentum.get(id(parameter))
            yield Shard(name, parameter, size, start, count, flat, offset, places)


def _trained(engine: Any) -> list[tuple[str, Any]]:
    return [
        (name, weight) for name, weight in engine.module.named_parameters() if weight.requires_grad
    ]


def _momentum_places(zero: Any) -> dict[int, tuple[int, int]]:
    """Return where ZeRO has the momentum of parameters under Muon, by their id (`Shard.momentum`).

    It keeps that of whole matrices, one after the other, also where it steps only a part of one.
    BF16_Optimizer, which serves bfloat16 at stage 1, lays it out as the weights.
    """
    places = {}
    for group, parameters in enumerate(getattr(zero, "params_in_partition", ())):
        if zero.optimizer.param_groups[group].get("use_muon"):
            sizes = [parameter.numel() for parameter in parameters]
            for index, parameter in enumerate(parameters):
                places[id(parameter)] = sum(sizes[:index]), sum(sizes)
    return places


def parts_of(engine: Any) -> Iterator[Part]:
    """Yield the parts of this rank, views; all ranks together have every element once."""
    if engine.zero_optimization_stage() == 0 and engine.global_rank:
        return  # rank 0 has everything
    for shard in shards_of(engine):
        yield Part(f"{shard.name}/{WEIGHT}", shard.start, shard.weight)
        for key, value in engine.basic_optimizer.state.get(shard.flat, {}).items():
            if key == STEP:
                if shard.start == 0:  # a copy: parameters share it, which safetensors refuses
                    yield Part(f"{shard.name}/{STEP}", 0, torch.tensor([value]))
                continue
            place = shard.offset
            if key == MOMENTUM and shard.momentum is not None:
                place = shard.momentum[0] + shard.start
            run = value.view(-1)[place : place + shard.count]
            yield Part(f"{shard.name}/{key}", shard.start, run)


def watch_gradients(engine: Any, seen: Callable[[dict[str, Tensor]], None]) -> None:
    """Have every step first pass on the gradients of this rank by name, as they are applied.

    They are clipped, float32 and flat views. A step may pass them on in several calls, each
    parameter once.
    """
    shards = [*shards_of(engine)]

    def watch(optimizer: Any, *_: Any) -> None:
        stepped = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        seen({
            shard.name: shard.flat.grad.view(-1)[shard.offset : shard.offset + shard.count]
            for shard in shards
            if id(shard.flat) in stepped and shard.flat.grad is not None
        })  # fmt: skip

    engine.basic_optimizer.register_step_pre_hook(watch)


def begin_exactly(engine: Any) -> None:
    """Step from the values before rounding of what an adapter's folder has in another dtype."""
    for shard in shards_of(engine):
        exact: Tensor | None = getattr(shard.parameter, EXACT, None)
        if exact is not None:
            run = exact.flatten()[shard.start : shard.start + shard.count]
            shard.weight.copy_(run.to(shard.weight))
            delattr(shard.parameter, EXACT)


@torch.no_grad()
def load_parts(engine: Any, reader: PartReader) -> None:
    """Replace weights and state of a DeepSpeed engine that has taken no step.

    Raises:
        InputError: Part of them is missing.
    """
    stage = engine.zero_optimization_stage()
    names: dict[str, list[str]] = {}
    for name in reader.names:
        parameter, _, key = name.rpartition("/")
        names.setdefault(parameter, []).append(key)
    for shard in shards_of(engine):
        run = reader.read(f"{shard.name}/{WEIGHT}", shard.start, shard.count)
        shard.weight.copy_(run)
        if stage == 3:
            shard.parameter.ds_tensor.detach()[: shard.count].copy_(run)
        for key in names[shard.name]:
            if key != WEIGHT:
                _load_state(engine.basic_optimizer.state[shard.flat], key, shard, reader)
    for name, parameter in _trained(engine):
        # Every rank has all weights to compute with; at stage 3 only those of small parameters.
        if 0 < stage < 3 or (stage == 3 and parameter.numel() == parameter.ds_numel):
            whole = reader.read(f"{name}/{WEIGHT}", 0, parameter.numel())
            parameter.copy_(whole.view_as(parameter))
    if stage == 3:
        engine.optimizer.invalidate_secondary_tensor()  # the node's copy, of the weights before


def _load_state(state: dict[str, Any], key: str, shard: Shard, reader: PartReader) -> None:
    """Load one entry of the optimizer's state of a shard, which is made where there is none."""
    name, flat = f"{shard.name}/{key}", shard.flat
    if key == STEP:
        (value,) = reader.read(name, 0, 1)
        state[key] = value.to(flat.device) if value.is_floating_point() else int(value)
        return
    start, count, place, shape = shard.start, shard.count, shard.offset, flat.shape
    if key == MOMENTUM and shard.momentum is not None:
        (place, size), start, count = shard.momentum, 0, shard.size
        shape = torch.Size([size])
    if key not in state:
        state[key] = flat.new_zeros(shape)
    state[key].view(-1)[place : place + count].copy_(reader.read(name, start, count))
