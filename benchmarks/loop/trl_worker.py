"""One run of TRL's GRPOTrainer on a recipe of Headway, in a process of its own.

    python -m benchmarks.loop.trl_worker RECIPE.json MICROBATCH padded|continuous THREADS

The recipe's model folder, prompts in the same order, reward, batch, group size, loss, optimizer and
schedule in TRL's own loop, on the cores of this process.
"""

import sys
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.harness.processes import run_main
from benchmarks.loop.peer_run import PeerRun, peer_run

FOLDERS = {"output_dir", "logging_dir"}


class StepCallback(TrainerCallback):
    """Tells the run when a step begins and ends."""

    def __init__(self, run: PeerRun) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the begin of a step."""
        self._run.begin()

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **more: Any
    ) -> None:
        """Write the row of a trained batch."""
        self._run.end(lambda: model)


def settings(run: PeerRun, micro: int, generation: str) -> Any:
    """Return the recipe as TRL's settings; the others stay at their defaults."""
    from trl import GRPOConfig

    config = run.config
    prompts, actors, learner = config.prompts, config.actors, config.learner
    samples = prompts.groups_per_batch * prompts.group_size
    return GRPOConfig(
        output_dir=str(run.directory.path / "trl"),
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
    torch.set_num_threads(int(threads))
    with peer_run("trl", recipe) as run:
        stated = settings(run, int(micro), generation)
        own = {key: value for key, value in stated.to_dict().items() if key not in FOLDERS}
        run.state(own, ("trl", "transformers", "accelerate", "torch"))
        train(run, stated)


def train(run: PeerRun, stated: Any) -> None:
    """Train the recipe with TRL to its end, with the rates of the recipe's own schedule."""
    from datasets import Dataset
    from trl import GRPOTrainer

    learner = run.config.learner

    def reward(
        prompts: list[str], completion_ids: list[list[int]], answer: list[str], **more: Any
    ) -> list[float]:
        return run.rewards(prompts, completion_ids, answer)

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype="float32")
    optimizer = AdamW(
        model.parameters(),
        lr=learner.learning_rate,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
    )
    rows = [{"prompt": prompt.text, "answer": prompt.answer} for prompt in run.prompts]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=stated,
        train_dataset=Dataset.from_list(rows),
        processing_class=run.tokenizer,
        callbacks=[StepCallback(run)],
        optimizers=(optimizer, LambdaLR(optimizer, run.rate_factor)),
    )
    trainer.train()


if __name__ == "__main__":
    run_main(main)
