"""One rank of the learner: its engine, and its part in everything that ranks do together."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway import clock
from learner.config.learner import LearnerConfig
from learner.config.lora import LoraConfig
from learner.diagnostics.batch_report import BatchReport
from learner.diagnostics.trained_log import note_trained
from learner.engine import checkpoint
from learner.engine.deepspeed import DeepSpeedEngine, PolicyEngine, shared_reference, sharing
from learner.engine.reference import REFERENCE_FOLDER, Reference, Teacher
from learner.model.compilation import start_compiler
from learner.model.hf_names import HuggingFaceNames
from learner.model.logprobs import LogprobOptions
from learner.model.lora import add_adapter, base_of, check_base, read_adapter
from learner.model.policy import Policy, load_policy
from learner.model.scalar_model import load_scalar_model
from learner.model.shared_weights import shape_of
from learner.ranks.spec import LearnerSpec
from learner.update import Updater
from queues.records import Payload
from queues.schema import decode_arrays
from weight_sync.adapter import AdapterForm
from weight_sync.probe import Scores, probe_sequences


def policy_steps(config: LearnerConfig, steps: int) -> int:
    """Return the optimizer steps of the policy in a run of so many batches, at least 1."""
    pretrained = config.critic.pretrain_batches if config.critic else 0
    return max(1, steps - pretrained) * config.steps_per_batch


def rates_of_parts(config: LearnerConfig) -> dict[str, float]:
    """Return the learning rates of parts of the policy that have their own."""
    critic = config.critic
    return {"value_head": critic.learning_rate} if critic is not None and critic.shared else {}


class Rank:
    """A loaded rank. Calls come from one thread at a time."""

    def __init__(self, spec: LearnerSpec) -> None:
        """Load model and optimizer. Collective; a group must have been joined before.

        Raises:
            InputError: The model cannot be trained, or the checkpoint not be loaded.
        """
        self.spec = spec
        config = self.config = spec.config
        random.seed(spec.seed)
        np.random.seed(spec.seed)
        torch.manual_seed(spec.seed)
        self._settings: dict[str, Any] = {
            "model_path": spec.model_path,
            "zero_stage": config.zero_stage,
            "offload_optimizer": config.offload_optimizer,
        }
        self._model: dict[str, Any] = {
            "dtype": config.dtype,
            "attention": config.attention,
            "activation_checkpointing": config.activation_checkpointing,
            "context": spec.context,
            "compiled": config.compiles,
        }
        self._options = LogprobOptions(
            chunk=config.logprob_chunk,
            temperature=spec.temperature,
            float32_head=config.float32_head,
            compiled=config.compiles,
        )
        if config.compiles:
            start_compiler(torch.device("cuda" if config.gpus else "cpu"))
        self.published_adapter: AdapterForm | None = None
        """The adapter where its factors alone are published; None: whole weights are."""
        self.engine = self._policy(spec.model_path)
        self.critic = self._critic()
        saved = Path(spec.checkpoint) if spec.checkpoint else None
        self.reference = self._reference(saved) if config.holds_reference else None
        self.updater = Updater(
            self.engine,
            config,
            critic=self.critic,
            reference=self.reference,
            teachers=self._teachers(),
        )
        self._settings_now = config, spec.steps
        self.state: checkpoint.State | None = None
        if saved is not None:
            self.state = checkpoint.load(self.engine, saved, critic=self.critic)
            self.updater.objective.state.update(self.state.objective_state)

    def _policy(self, path: str) -> PolicyEngine:
        config, critic = self.config, self.config.critic
        shared = critic if critic is not None and critic.shared else None
        options = replace(self._options, entropy_gradient=config.entropy is not None)
        with sharing(config.zero_stage, config.ranks_of_node):
            policy = load_policy(path, options, **self._model)
        if shared is not None:
            policy.add_value_head()
            policy.values_after = config.bootstraps
        self._adapt(policy.model, config.lora)
        self._names = HuggingFaceNames(policy.model)
        longest = self.spec.context and self.spec.context - 1  # engines sample a token more
        self.probe_sequences = probe_sequences(policy.model.config.get_text_config(), longest)
        engines_merge = self.spec.weight_sync.staged and not self._names.converts_adapted
        if config.lora is not None and engines_merge:
            base = base_of(policy.model)
            self.published_adapter = AdapterForm(scale=config.lora.scale, base=base)
        return PolicyEngine(
            policy,
            config,
            total_steps=policy_steps(config, self.spec.steps),
            rates=rates_of_parts(config),
            **self._settings,
        )

    def _adapt(self, model: Any, lora: LoraConfig | None, *, part: str = "") -> None:
        """Add an adapter, if any; a checkpoint replaces the factors that it begins with."""
        if lora is None:
            return
        checkpoint_folder = self.spec.checkpoint
        if checkpoint_folder is not None:
            lora = lora.model_copy(update={"path": None})
        section = f"{self.spec.section}.critic.lora" if part else f"{self.spec.section}.lora"
        add_adapter(model, lora, seed=self.spec.seed, section=section)
        if checkpoint_folder is not None:
            check_base(read_adapter(Path(checkpoint_folder) / part), model)

    def _critic(self) -> DeepSpeedEngine | None:
        spec, config = self.spec, self.config.critic
        if config is None or config.shared:
            return None
        with sharing(self.config.zero_stage, self.config.ranks_of_node):
            model = load_scalar_model(config.path or spec.model_path, **self._model, seed=spec.seed)
        self._adapt(model.model, config.lora, part=checkpoint.CRITIC_FOLDER)
        steps = spec.steps * self.config.steps_per_batch
        return DeepSpeedEngine(model, config, total_steps=steps, **self._settings)

    def _adopt(self, config: LearnerConfig, steps: int) -> None:
        """Go on with other settings of optimizers and of the length of the run."""
        self._settings_now = config, steps
        self.updater.config = config
        self.engine.adopt(config, policy_steps(config, steps), rates_of_parts(config))
        if self.critic is not None and config.critic is not None:
            self.critic.adopt(config.critic, steps * config.steps_per_batch)

    def _reference(self, saved: Path | None) -> Reference:
        """Load the reference as it was saved, or else as it is at the start of a run."""
        config = self.config
        folder = saved / REFERENCE_FOLDER if saved else None
        folder = folder if folder is not None and folder.exists() else None
        first = (config.kl.reference if config.kl else None) or self.spec.model_path
        policy, how = self._frozen(str(folder or first))
        return Reference(policy, origin=first, saved=folder, **how)

    def _frozen(self, path: str) -> tuple[Policy, dict[str, Any]]:
        """Load a model that is not trained; return it, and keywords of `Reference` for it."""
        model = {**self._model, "activation_checkpointing": False}
        with sharing(self.config.zero_stage, self.config.ranks_of_node):
            policy = load_policy(path, self._options, **model)
        shared = shared_reference if self.engine.gathers else None
        return policy, {"device": self.engine.device, "shared": shared}

    def _teachers(self) -> list[Teacher]:
        """Load the teachers, which tell words that the policy has."""
        config = self.config.distillation
        if config is None:
            return []
        words, _ = shape_of(self.engine.module.model.get_output_embeddings().weight)
        teachers = []
        for path in self.spec.teachers:
            policy, how = self._frozen(path)
            teachers.append(Teacher(policy, top_k=config.top_k, words=words, origin=path, **how))
        return teachers

    def update(self, payloads: Sequence[Payload], version: int) -> BatchReport:
        """Train a batch of encoded groups; return figures over all ranks. Collective."""
        groups = decode_arrays(payloads)
        if (settings := self.spec.settings_at(version)) != self._settings_now:
            self._adopt(*settings)
        report = self.updater.update(groups, version)
        dtypes = {self.config.dtype, self.spec.served_dtype}
        if self.config.lora is not None and "bfloat16" in dtypes:
            report = replace(report, lost_to_rounding=self.engine.lost_to_rounding())
        if self.engine.rank == 0:
            note_trained(groups, version)
        return report

    def probe(self) -> Scores:
        """Score the sequences of the probe (`ProbeReport.scores`). Collective."""
        sequences = self.probe_sequences
        token_ids = torch.tensor([token for sequence in sequences for token in sequence])
        position_ids = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        logprobs = self.engine.plain_logprobs(token_ids, position_ids).cpu()
        return tuple(logprobs[position_ids > 0].tolist())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the policy as its folder has them, or those of its adapter.

        Collective where the engine gathers.
        """
        if self.published_adapter is not None:
            return self.engine.adapter()
        return self._names.of(self.engine.weights())

    def gather(self, *, probe: bool = False) -> None:
        """Take part in another rank's reading of the weights, after a `probe`. Collective."""
        if probe:
            self.probe()
        for _ in self.weights():
            pass

    def capture(self) -> None:
        """Copy this rank's part of a checkpoint to host memory, for `write`. Collective."""
        self._write = checkpoint.capture(self.engine, critic=self.critic, reference=self.reference)

    def write(self, temporary: str) -> None:
        """Write what `capture` copied, durably; in any thread, while training goes on."""
        self._write(Path(temporary))

    def state_at(self, version: int) -> checkpoint.State:
        """Return the description of a checkpoint that is captured now."""
        config = self.config
        return checkpoint.State(
            version=version,
            saved_at=clock.now(),
            optimizer_steps=self.engine.steps_taken,
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            cursor=None,
            objective_state=dict(self.updater.objective.state),
            wire_dtype=self.spec.weight_sync.wire_dtype,
            adapter_alone=self.published_adapter is not None,
        )

    def save(self, root: Path, version: int) -> Path:
        """Write a checkpoint while training waits, as the only rank; return its folder."""
        temporary = checkpoint.prepare(root, version)
        self.capture()
        self.write(str(temporary))
        return checkpoint.finish(root, self.state_at(version))

    def close(self) -> None:
        """Release what the engines hold."""
        self.engine.close()
        if self.critic is not None:
            self.critic.close()


class ScalarRank(Rank):
    """A rank that trains a model with one number for each token in the place of a policy."""

    def _policy(self, path: str) -> DeepSpeedEngine:  # type: ignore[override]
        spec, config = self.spec, self.config
        with sharing(config.zero_stage, config.ranks_of_node):
            model = load_scalar_model(path, **self._model, seed=spec.seed)
        self._adapt(model.model, config.lora)
        return DeepSpeedEngine(model, config, total_steps=spec.steps, **self._settings)
