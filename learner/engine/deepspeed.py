"""The train engine on DeepSpeed: ZeRO, gradient clipping, schedule, optimizer state.

The only file that imports deepspeed. One process is one rank.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from learner.config.lora import WEIGHTS_FILE
from learner.config.optimizer import OptimizerConfig
from learner.disk_wait import write_whole
from learner.engine.gathering import BUCKET_ELEMENTS, elements, gathering, overlaps
from learner.engine.lr_schedule import rate_factor
from learner.engine.model_folder import write_files, write_weights
from learner.engine.optimizer_state import (
    begin_exactly,
    load_parts,
    parts_of,
    shards_of,
    watch_gradients,
)
from learner.engine.parameter_groups import optimizer_section, parameter_groups
from learner.engine.process_group import join_alone
from learner.engine.protocol import Forward
from learner.engine.tensor_parts import Part, PartReader, in_buckets, write_parts
from learner.errors import TrainingDiverged
from learner.model import lora
from learner.model.forward_check import check_forward, choose_way
from learner.model.host_copy import HostCopy
from learner.model.policy import Policy
from learner.model.scalar_model import ScalarModel
from learner.model.shared_weights import each_loaded, shape_of

OPTIMIZER_FOLDER = "optimizer"
STEPS_TAKEN = "steps_taken"
GATHER_BYTES = 512 * 2**20
"""Weights that ZeRO 3 gathers at once, at least one tensor."""

if not torch.cuda.is_available():
    # DeepSpeed would compile C++ for a minute before the first step. `start_compiler` undoes it.
    torch._dynamo.config.disable = True


def _prepare() -> None:
    """Join a group, alone unless `process_group.join` was called before, and set DeepSpeed up."""
    join_alone()
    os.environ["LOCAL_RANK"] = "0"  # a rank sees no device but its own
    if not torch.cuda.is_available():
        # Without a GPU it would compile C++ for a minute before the first step.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed's own would mark every matrix but embeddings, and undo `optimizer_section`.
    deepspeed.set_optimizer_flags = lambda config, model: None
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


@contextmanager
def sharing(zero_stage: int, node_ranks: int | None = None) -> Iterator[None]:
    """Under ZeRO 3, share out the weights of models that are loaded meanwhile. Collective.

    Each tensor is read, and that of rank 0 scattered, before the next is read, so that no rank ever
    holds a whole model. From the first pass of a step to its end, every `node_ranks` ranks in their
    order, where given, share out a copy too, which they gather from in further passes.
    """
    if zero_stage < 3:
        yield
        return
    _prepare()
    if node_ranks is not None and groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(node_ranks)
    zero = deepspeed.zero.Init(
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group()
    )

    def share(parameter: nn.Parameter) -> None:
        if not hasattr(parameter, "ds_id"):
            if dist.get_rank():  # rank 0 sends it
                parameter.data = torch.empty_like(parameter, device=zero.local_device)
            zero._convert_to_zero_parameters([parameter])

    with each_loaded(share):
        yield


def shared_reference(policy: Policy) -> Callable[..., tuple[Tensor, ...]]:
    """Return a frozen policy that was loaded under `sharing`, as a function of columns. Collective.

    Weights are gathered for each layer as it is computed.
    """
    _prepare_shared(policy)
    engine, *_ = deepspeed.initialize(
        model=policy,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, **gathering(elements(policy))},
            "bf16": {"enabled": policy.model.dtype == torch.bfloat16},
        },
    )
    _register_head(policy)
    for buffer in policy.buffers():
        buffer.data = buffer.data.to(engine.device)
    run: Callable[..., tuple[Tensor, ...]] = engine
    return run


def _prepare_shared(module: Policy | ScalarModel) -> None:
    """Choose the way of a module whose weights ranks share; gather convolutions with their layers.

    Layers that carry a state read the weights of their parts themselves.
    """
    choose_way(module, deepspeed.zero.GatheredParameters)
    for layer in module.modules():
        if any(isinstance(part, nn.Conv1d) for part in layer.children()):
            for parameter in [p for part in layer.children() for p in part.parameters()]:
                deepspeed.zero.register_external_parameter(layer, parameter)


def _register_head(policy: Policy) -> None:
    """Tell ZeRO 3 that the output embedding is applied outside of the module that owns it."""
    for parameter in policy.model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(policy, parameter)


class DeepSpeedEngine:
    """A module, its gradients and its optimizer under DeepSpeed (a `Trainable`).

    The module is called with columns of a microbatch.
    """

    def __init__(
        self,
        module: Policy | ScalarModel,
        config: OptimizerConfig,
        *,
        model_path: str,
        zero_stage: int,
        total_steps: int,
        offload_optimizer: bool = False,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """Join the group of ranks and shard the module, which is changed in place.

        `model_path` has the files that are saved beside weights; `total_steps` and `rates` are as
        in `Trainable.adopt`.
        """
        _prepare()
        self.module = module
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._model_path = model_path
        self._zero_stage = zero_stage
        self._adapted = any(True for _ in lora.factors(module))
        self._copies = HostCopy()
        self._captured: Future[dict[str, Tensor]] | None = None
        self.steps_taken = 0
        if zero_stage == 3:
            _prepare_shared(module)
        optimizer, trained = optimizer_section(config, module), elements(module, trained=True)
        zero: dict[str, Any] = {
            "stage": zero_stage,
            "reduce_bucket_size": min(BUCKET_ELEMENTS, trained),
        }
        if zero_stage < 3:
            zero["overlap_comm"] = overlaps(zero_stage, self.ranks, trained)
        if zero_stage == 3:
            zero |= gathering(elements(module))
        if offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=parameter_groups(module, config, rates or {}),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,
                "zero_optimization": zero,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": config.gradient_clipping or math.inf,
                "bf16": {"enabled": module.model.dtype == torch.bfloat16},
                "data_types": {"grad_accum_dtype": "fp32"},
                # Else ranks sum gradients in bfloat16.
                **({"communication_data_type": "fp32"} if self.ranks > 1 else {}),
                "optimizer": optimizer,
            },
        )
        if zero_stage == 3 and isinstance(module, Policy):
            _register_head(module)
        for buffer in module.buffers():  # DeepSpeed moves only models that are not shared
            buffer.data = buffer.data.to(self.device)
        if zero_stage == 0 and module.model.dtype == torch.float32:
            self._engine.clip_fp32_gradients = self._clip  # DeepSpeed's own forgets the norm
        begin_exactly(self._engine)
        self.adopt(config, total_steps, rates)
        # Below stage 3 DeepSpeed refuses to have its outputs differentiated by others, or fails.
        check_forward(module, self.outputs if self.gathers else module, device=self.device)

    def adopt(
        self, config: OptimizerConfig, total_steps: int, rates: Mapping[str, float] | None = None
    ) -> None:
        self._config, self._total_steps = config, total_steps
        self.full_rates: list[float] = []
        for group in self._optimizer.param_groups:
            rate = config.learning_rate
            if group.get("use_muon") and config.muon_learning_rate is not None:
                rate = config.muon_learning_rate
            for part, own in (rates or {}).items():
                rate = own if group["name"].startswith(part) else rate
            self.full_rates.append(rate)
        clipping = config.gradient_clipping or math.inf
        self._engine._config.gradient_clipping = clipping
        if self._zero_stage:
            self._engine.optimizer.clip_grad = clipping

    @property
    def learning_rate(self) -> float:
        """See `Trainable.learning_rate`; under Muon that of the parameters that Adam updates."""
        step = max(0, self.steps_taken - 1)
        factor = rate_factor(self._config.schedule, step, self._total_steps)
        return self._config.learning_rate * factor

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    def outputs(self, *columns: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._engine(*(column.to(self.device) for column in columns))
        return outputs

    def backward(self, loss: Tensor) -> None:
        """See `Trainable.backward`; the factor undoes DeepSpeed's mean over ranks."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self) -> float:
        self.finish_capture()
        factor = rate_factor(self._config.schedule, self.steps_taken, self._total_steps)
        for group, rate in zip(self._optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = rate * factor
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient norm is {norm} at optimizer step {self.steps_taken}: the loss or "
                "its gradient is not finite"
            )
        self.steps_taken += 1
        return norm

    def watch_gradients(self, seen: Callable[[dict[str, Tensor]], None]) -> None:
        """Have every step first pass on its gradients (`optimizer_state.watch_gradients`)."""
        watch_gradients(self._engine, seen)

    def stepped_weights(self) -> dict[str, Tensor]:
        """Return the float32 weights that this rank steps, by name and flat; views."""
        return {shard.name: shard.weight for shard in shards_of(self._engine)}

    def _clip(self) -> None:
        """Clip as DeepSpeed does, and keep the norm for `get_global_grad_norm`."""
        norm = torch.nn.utils.clip_grad_norm_(
            self._engine.module.parameters(), self._engine.gradient_clipping()
        )
        self._engine._global_grad_norm = float(norm)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.ranks == 1:
            return values
        total = values.detach().to(self._engine.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    @property
    def gathers(self) -> bool:
        return self._zero_stage == 3

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`; gathers `GATHER_BYTES` at a time."""
        return self._gathered(lora.weights(self._engine.module.model))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors of the adapter alone, by PEFT's names; otherwise as `weights`."""
        return self._gathered(lora.factors(self._engine.module.model))

    def _settle(self) -> None:
        """Let go of what a pass fetched ahead under ZeRO 3 and may still be on its way."""
        if self.gathers:
            self._engine.optimizer.empty_partition_cache()

    def _gathered(self, weights: Iterable[lora.Weight]) -> Iterator[tuple[str, Tensor]]:
        self._settle()
        for bucket in in_buckets(weights, _bytes_of, GATHER_BYTES):
            parameters = [parameter for weight in bucket for parameter in weight.parameters]
            with deepspeed.zero.GatheredParameters(parameters, enabled=self.gathers):
                for weight in bucket:
                    yield weight.name, weight.value()

    def lost_to_rounding(self) -> float | None:
        """See `lora.lost_to_rounding`. Collective."""
        self._settle()
        gathered = partial(deepspeed.zero.GatheredParameters, enabled=self.gathers)
        return lora.lost_to_rounding(self._engine.module.model, gathered)

    def save_model(self, folder: Path) -> None:
        """Write the model as a folder that transformers loads. Collective.

        An adapter is merged in.
        """
        if self.rank == 0:
            self._write(folder, self.weights(), adapter=False)
        elif self.gathers:
            for _ in self.weights():
                pass
        dist.barrier()

    def _write(self, folder: Path, weights: Iterable[tuple[str, Tensor]], *, adapter: bool) -> None:
        """Write the folder of the model, or of its adapter, with these weights."""
        model = self._engine.module.model
        write_files(model, self._model_path, folder, adapter=adapter)
        if adapter:
            write = partial(lora.write_adapter, model, dict(weights), folder)
            write_whole(folder / WEIGHTS_FILE, write)
        else:
            write_weights(model, weights, folder)

    def capture(self) -> Callable[[Path], None]:
        """See `Trainable.capture`; ranks share out the optimizer's folder."""
        by_name = self._capture_by_name()
        state = dict(self.weights()) if self.rank == 0 and by_name is None else {}
        parts = {f"{part.name}@{part.start}": part for part in parts_of(self._engine)}
        views = ((name, part.values.detach()) for name, part in parts.items())
        captured = self._captured = self._copies.begin([*state.items(), *views])
        steps = Part(STEPS_TAKEN, 0, torch.tensor([self.steps_taken]))

        def write(folder: Path) -> None:
            copies = captured.result()
            held = [part._replace(values=copies[name]) for name, part in parts.items()]
            if self.rank == 0:
                weights = {name: copies[name] for name in state} if by_name is None else by_name
                self._write(folder, weights.items(), adapter=self._adapted)
                held.append(steps)
            write_parts(folder / OPTIMIZER_FOLDER, held, rank=self.rank, ranks=self.ranks)

        return write

    def finish_capture(self) -> None:
        """Wait until `capture` has copied what a step changes; `step` does so by itself."""
        if self._captured is not None:
            self._captured.result()

    def _capture_by_name(self) -> dict[str, Tensor] | None:
        """Copy an adapter, or gathered weights, on rank 0; None where the model has all weights."""
        if not (self._adapted or self.gathers):
            return None
        model = self._engine.module.model
        tensors = self._gathered(lora.trained(model)) if self._adapted else self.weights()
        copies = self._copies.take(tensors) if self.rank == 0 else {}
        for _ in tensors:  # other ranks only take part
            pass
        return copies

    def load(self, folder: Path) -> None:
        reader = PartReader(folder / OPTIMIZER_FOLDER)
        self._settle()
        load_parts(self._engine, reader)
        self.steps_taken = int(reader.read(STEPS_TAKEN, 0, 1))

    def close(self) -> None:
        """See `Trainable.close`; the process stays in its group, which DeepSpeed joins once."""
        self._engine.destroy()


class PolicyEngine(DeepSpeedEngine):
    """A policy under DeepSpeed (a `TrainEngine`)."""

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        wanted: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Forward:
        chosen = [column for column in (wanted, others) if column is not None]
        outputs = [*self.outputs(token_ids, position_ids, *chosen)]
        of_others = None if others is None else outputs.pop(2)
        return Forward(*outputs)._replace(others=of_others)

    @torch.no_grad()
    def plain_logprobs(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the log-probabilities [N] of `forward` at temperature 1. Collective."""
        policy: Policy = self._engine.module
        options = policy.options
        policy.options = replace(options, temperature=1.0)
        try:
            return self.forward(token_ids, position_ids).logprobs
        finally:
            policy.options = options

    def base_logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        with lora.switched_off(self._engine.module.model):
            return self.forward(token_ids, position_ids, wanted).logprobs


def _bytes_of(weight: lora.Weight) -> int:
    return sum(shape_of(part).numel() * part.element_size() for part in weight.parameters)
