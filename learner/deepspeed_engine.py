"""Trains a policy with DeepSpeed: ZeRO, gradient clipping, schedule, optimizer state.

The only file that imports deepspeed. One process is one rank; who starts it is `ray_group`.
"""

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from learner.config import OptimizerConfig
from learner.errors import TrainingDiverged
from learner.model import Policy, check_packing, load_tokenizer
from learner.schedule import rate_factor


def _join_group() -> None:
    """Makes a process group of this one rank, on a free local port."""
    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
    )
    if torch.cuda.is_available():
        deepspeed.init_distributed(dist_backend="nccl", verbose=False)
        return
    # Without a GPU these would compile C++ for a minute before the first step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch._dynamo.config.disable = True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def _optimizer(config: OptimizerConfig, policy: Policy) -> dict[str, Any]:
    """DeepSpeed's optimizer section; marks the matrices that Muon takes."""
    embedding = policy.model.get_input_embeddings().weight
    head = policy.model.get_output_embeddings().weight
    for parameter in policy.parameters():
        inner = parameter is not embedding and parameter is not head
        parameter.use_muon = config.optimizer == "muon" and parameter.ndim == 2 and inner  # type: ignore[attr-defined]
    shared = {
        "betas": list(config.betas),
        "weight_decay": config.weight_decay,
        "torch_adam": True,  # DeepSpeed's own is compiled at first use, and needs a toolchain
    }
    if config.optimizer == "muon":
        rates = {"muon_lr": config.muon_learning_rate, "adam_lr": config.learning_rate}
        return {"type": "Muon", "params": {**rates, **shared, "momentum": 0.95}}
    return {"type": "AdamW", "params": {"lr": config.learning_rate, **shared}}


class DeepSpeedEngine:
    """A policy, its gradients and its optimizer under DeepSpeed (a `TrainEngine`)."""

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        *,
        model_path: str,
        zero_stage: int,
        dtype: str,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        _join_group()
        self._config = config
        self._model_path = model_path
        self._temperature = temperature
        self._total_steps = total_steps
        self._steps_taken = 0
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=policy,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,
                "zero_optimization": {"stage": zero_stage},
                "gradient_clipping": config.gradient_clipping or math.inf,
                "bf16": {"enabled": dtype == "bfloat16"},
                "data_types": {"grad_accum_dtype": "fp32"},
                "optimizer": _optimizer(config, policy),
            },
        )
        if zero_stage == 0 and dtype == "float32":
            self._engine.clip_fp32_gradients = self._clip  # DeepSpeed's own forgets the norm
        self._full_rates = [group["lr"] for group in self._optimizer.param_groups]
        check_packing(self.forward, dtype=dtype)

    def forward(self, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `TrainEngine.forward`."""
        device = self._engine.device
        logprobs, entropy = self._engine(
            token_ids.to(device), position_ids.to(device), self._temperature
        )
        return logprobs, entropy

    def backward(self, loss: Tensor) -> None:
        """See `TrainEngine.backward`."""
        if not torch.isfinite(loss):
            raise TrainingDiverged(
                f"the loss is {loss.item()} before optimizer step {self._steps_taken}"
            )
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        """See `TrainEngine.step`."""
        factor = rate_factor(self._config.schedule, self._steps_taken, self._total_steps)
        for group, rate in zip(self._optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = rate * factor
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient norm is {norm} at optimizer step {self._steps_taken}"
            )
        self._steps_taken += 1
        return norm

    def _clip(self) -> None:
        """Clips as DeepSpeed does, and keeps the norm where `get_global_grad_norm` looks."""
        norm = torch.nn.utils.clip_grad_norm_(
            self._engine.module.parameters(), self._engine.gradient_clipping()
        )
        self._engine._global_grad_norm = float(norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        for name, parameter in self._engine.module.model.named_parameters():
            yield name, parameter.detach()

    def save_model(self, folder: Path) -> None:
        """See `TrainEngine.save_model`."""
        self._engine.module.model.save_pretrained(folder)
        load_tokenizer(self._model_path).save_pretrained(folder)

    def save_optimizer(self, folder: Path) -> None:
        """See `TrainEngine.save_optimizer`; in DeepSpeed's own format."""
        self._engine.save_checkpoint(str(folder), tag="state")

    def close(self) -> None:
        """See `TrainEngine.close`; the process stays in its group, which DeepSpeed joins once."""
        self._engine.destroy()
