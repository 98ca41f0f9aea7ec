"""One rank of the learner: its engine, and its part in everything that ranks do together.

Methods marked collective wait for all ranks to call them. Leaves out processes (`ray_rank`) and
which rank leads (`ray_lead`).
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner import checkpoint
from learner.config import LearnerConfig
from learner.deepspeed_engine import DeepSpeedEngine
from learner.model import load_policy
from learner.update import Updater
from queues.schema import decode


class Rank:
    """A loaded rank. Calls come from one thread at a time."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model_path: str,
        checkpoint_path: str | None,
        seed: int,
        steps: int,
        temperature: float,
    ) -> None:
        """Loads model and optimizer. Collective; a group must have been joined before.

        Args:
            config: Section `[learner]`.
            model_path: Where the weights are from, unless there is a checkpoint, and the tokenizer.
            checkpoint_path: A folder to go on from exactly.
            seed: Of everything random in the process.
            steps: Batches of the whole run.
            temperature: At which actors sample.

        Raises:
            InputError: The model cannot be trained, or the checkpoint not be loaded.
        """
        self.config = config
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        policy = load_policy(
            model_path,
            dtype=config.dtype,
            attention=config.attention,
            chunk=config.logprob_chunk,
            activation_checkpointing=config.activation_checkpointing,
        )
        self.engine = DeepSpeedEngine(
            policy,
            config,
            model_path=model_path,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            total_steps=steps * config.steps_per_batch,
            temperature=temperature,
            offload_optimizer=config.offload_optimizer,
        )
        self.updater = Updater(self.engine, config)
        self.state: checkpoint.State | None = None
        if checkpoint_path is not None:
            self.state = checkpoint.load(
                self.engine,
                Path(checkpoint_path),
                zero_stage=config.zero_stage,
                dtype=config.dtype,
            )
            self.updater.advantage_state.update(self.state.advantage_state)

    def update(self, payloads: Sequence[bytes], version: int) -> dict[str, Any]:
        """Trains a batch of encoded groups; statistics over all ranks. Collective."""
        return self.updater.update([decode(payload) for payload in payloads], version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy. Collective where the engine gathers."""
        return self.engine.weights()

    def gather(self) -> None:
        """Takes part in another rank's reading of the weights. Collective."""
        for _ in self.weights():
            pass

    def write(self, temporary: str) -> None:
        """Writes this rank's part of a checkpoint, durably. Collective."""
        checkpoint.write_part(self.engine, Path(temporary))
