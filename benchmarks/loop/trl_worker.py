"""One run of TRL's GRPOTrainer on a recipe of Headway, in a process of its own.

    python -m benchmarks.loop.trl_worker RECIPE.json MICROBATCH padded|continuous

The recipe's model folder, prompts in the same order, reward, batch, group size, loss, optimizer and
schedule in TRL's own loop, on the cores and threads of this process. Writes `metrics.jsonl` with a
row for each batch, `checkpoints/`, and `trl.json` with TRL's settings and versions.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from actors.rewards.answers import last_answer
from benchmarks.harness.processes import run_main
from benchmarks.loop.versus_trl import SETTINGS
from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs, load_inputs
from deploy.storage.run_directory import RunDirectory
from headway import clock
from learner.engine.lr_schedule import rate_factor
from queues.records import FinishReason


class RecipeSchedule(GRPOTrainer):
    """TRL's trainer with the recipe's learning rates: the first of its own schedules would be 0."""

    def __init__(self, config: RunConfig, **arguments: Any) -> None:
        self._recipe = config
        super().__init__(**arguments)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """See `transformers.Trainer`."""
        schedule, steps = self._recipe.learner.schedule, self._recipe.steps
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda step: rate_factor(schedule, step, steps)
        )
        return self.lr_scheduler


class BatchLog(TrainerCallback):
    """Writes a row when a batch is done, and saves the model every `every` batches."""

    def __init__(self, directory: RunDirectory, every: int, tokenizer: Any) -> None:
        self._directory, self._every, self._tokenizer = directory, every, tokenizer
        self._began = clock.now()
        self.tokens = self.rollouts = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the begin of a step, which generates and trains."""
        self._began = clock.now()

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **more: Any
    ) -> None:
        """Write the row of a trained batch."""
        row = {
            "version": state.global_step - 1,
            "wait_started_at": self._began,
            "step_finished_at": clock.now(),
            "rollouts_trained": self.rollouts,
            "tokens_trained": self.tokens,
        }
        self.tokens = self.rollouts = 0
        self._directory.append("metrics.jsonl", [row])
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            folder = self._directory.checkpoints / f"v{state.global_step:06d}"
            model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)


def settings(config: RunConfig, directory: RunDirectory, micro: int, generation: str) -> GRPOConfig:
    """Return the recipe as TRL's settings; the others stay at their defaults."""
    prompts, actors, learner = config.prompts, config.actors, config.learner
    samples = prompts.groups_per_batch * prompts.group_size
    options = dict(config.objective.loss_options)
    return GRPOConfig(
        output_dir=str(directory.path / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        steps_per_generation=samples // micro,
        num_generations=prompts.group_size,
        num_iterations=1,
        max_completion_length=actors.max_new_tokens,
        temperature=actors.temperature,
        max_steps=config.steps,
        learning_rate=learner.learning_rate,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.gradient_clipping,
        loss_type="cispo",
        epsilon_high=options["cap_high"],
        scale_rewards="group",
        beta=0.0,
        seed=config.seed,
        shuffle_dataset=False,
        use_transformers_continuous_batching=generation == "continuous",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def write_settings(stated: GRPOConfig, file: Path) -> None:
    folders = ("output_dir", "logging_dir")
    settings = {key: value for key, value in stated.to_dict().items() if key not in folders}
    versions = {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")}
    file.write_text(json.dumps({"versions": versions, "settings": settings}, default=str))


def main() -> None:
    recipe, micro, generation = sys.argv[1:]
    config = RunConfig.model_validate_json(Path(recipe).read_text())
    inputs = load_inputs(config)
    directory = RunDirectory.of(config)
    with directory.created(config, replace=False):
        train(config, inputs, directory, int(micro), generation)


def train(
    config: RunConfig, inputs: Inputs, directory: RunDirectory, micro: int, generation: str
) -> None:
    """Train the recipe with TRL to its end."""
    tokenizer = AutoTokenizer.from_pretrained(inputs.model_path)
    log = BatchLog(directory, config.learner.checkpoint_every, tokenizer)

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **more: Any,
    ) -> list[float]:
        log.rollouts += len(completions)
        log.tokens += sum(map(len, completion_ids))

        async def score(index: int) -> float:
            ended = completion_ids[index][-1] == tokenizer.eos_token_id
            metadata = {"finish_reason": FinishReason.STOP if ended else FinishReason.LENGTH}
            return await last_answer(prompts[index], completions[index], answer[index], metadata)

        async def score_all() -> list[float]:
            return [await score(index) for index in range(len(completions))]

        return asyncio.run(score_all())

    stated = settings(config, directory, micro, generation)
    write_settings(stated, directory.path / SETTINGS)
    rows = inputs.prompts.source.next(config.steps * config.prompts.groups_per_batch)
    data = Dataset.from_list([{"prompt": row.text, "answer": row.answer} for row in rows])
    trainer = RecipeSchedule(
        config,
        model=AutoModelForCausalLM.from_pretrained(inputs.model_path, dtype="float32"),
        reward_funcs=reward,
        args=stated,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[log],
    )
    trainer.train()
    if not (directory.checkpoints / f"v{config.steps:06d}").exists():
        sys.exit(f"TRL stopped before batch {config.steps}")
    directory.summary_file.write_text(json.dumps({"status": "done"}) + "\n")


if __name__ == "__main__":
    run_main(main)
