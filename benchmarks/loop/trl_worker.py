"""One run of TRL's GRPOTrainer on a recipe of Headway, in a process of its own.

    python -m benchmarks.loop.trl_worker RECIPE.json MICROBATCH padded|continuous THREADS

The recipe's model folder, prompts in the same order, reward, batch, group size, loss, optimizer and
schedule in TRL's own loop, on the cores of this process. Writes `metrics.jsonl` with a
row for each batch, `checkpoints/`, and `trl.json` with TRL's settings and versions.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from actors.rewards.answers import last_answer
from benchmarks.harness.processes import run_main
from benchmarks.harness.training_runs import BATCHES
from benchmarks.loop.versus_trl import SETTINGS, TRL
from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs, load_inputs
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway import clock
from learner.engine.lr_schedule import rate_factor
from queues.records import FinishReason

FOLDERS = {"output_dir", "logging_dir"}


class BatchLog(TrainerCallback):
    """Writes a row for each batch, and saves the model every `every` batches."""

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
        version, now = state.global_step - 1, clock.now()
        row = {"version": version, "wait_started_at": self._began, "step_finished_at": now}
        row |= {"rollouts_trained": self.rollouts, "tokens_trained": self.tokens}
        self.tokens = self.rollouts = 0
        append_rows(self._directory.path / BATCHES, [row])
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            folder = self._directory.checkpoints / f"v{state.global_step:06d}"
            model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)


def settings(config: RunConfig, directory: RunDirectory, micro: int, generation: str) -> Any:
    """Return the recipe as TRL's settings; the others stay at their defaults."""
    from trl import GRPOConfig

    prompts, actors, learner = config.prompts, config.actors, config.learner
    samples = prompts.groups_per_batch * prompts.group_size
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
        epsilon_high=learner.loss_options["cap_high"],
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


def main() -> None:
    recipe, micro, generation, threads = sys.argv[1:]
    sys.path.insert(0, str(TRL))
    torch.set_num_threads(int(threads))
    config = RunConfig.model_validate_json(Path(recipe).read_text())
    inputs = load_inputs(config)
    directory = RunDirectory.of(config)
    with directory.created(config, replace=False):
        stated = settings(config, directory, int(micro), generation)
        own = {key: value for key, value in stated.to_dict().items() if key not in FOLDERS}
        versions = {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")}
        text = json.dumps({"versions": versions, "settings": own}, default=str)
        (directory.path / SETTINGS).write_text(text)
        train(config, inputs, directory, stated)


def train(config: RunConfig, inputs: Inputs, directory: RunDirectory, stated: Any) -> None:
    """Train the recipe with TRL to its end, with the rates of the recipe's own schedule."""
    from datasets import Dataset
    from trl import GRPOTrainer

    learner, steps = config.learner, config.steps
    tokenizer = AutoTokenizer.from_pretrained(inputs.model_path)
    log = BatchLog(directory, learner.checkpoint_every, tokenizer)

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **more: Any,
    ) -> list[float]:
        log.rollouts += len(completions)
        log.tokens += sum(map(len, completion_ids))

        async def score_all() -> list[float]:
            ended = (ids[-1] == tokenizer.eos_token_id for ids in completion_ids)
            ends = (FinishReason.STOP if eos else FinishReason.LENGTH for eos in ended)
            facts = [{"finish_reason": end} for end in ends]
            rows = zip(prompts, completions, answer, facts, strict=True)
            return [await last_answer(*row) for row in rows]

        return asyncio.run(score_all())

    rows = inputs.prompts.source.next(steps * config.prompts.groups_per_batch)
    model = AutoModelForCausalLM.from_pretrained(inputs.model_path, dtype="float32")
    optimizer = AdamW(
        model.parameters(),
        lr=learner.learning_rate,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda step: rate_factor(learner.schedule, step, steps))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=stated,
        train_dataset=Dataset.from_list([{"prompt": r.text, "answer": r.answer} for r in rows]),
        processing_class=tokenizer,
        callbacks=[log],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    if not (directory.checkpoints / f"v{steps:06d}").exists():
        sys.exit(f"TRL stopped before batch {steps}")
    directory.summary_file.write_text(json.dumps({"status": "done"}) + "\n")


if __name__ == "__main__":
    run_main(main)
