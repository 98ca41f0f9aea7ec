"""The part that workers of all peers share: recipe and prompts, the reward, and the files of a run.

`metrics.jsonl` gets a row for each batch, `checkpoints/` models as Hugging Face folders, and
`peer.json` the settings of the peer and versions.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from actors.rewards.answers import last_answer
from benchmarks.harness.training_runs import BATCHES
from benchmarks.loop.peers import SETTINGS, folder_of
from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import load_inputs
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway import clock
from learner.engine.lr_schedule import rate_factor
from queues.records import FinishReason, Prompt


class PeerRun:
    """A run that a peer trains: its prompts in order, rewards, rows and checkpoints."""

    def __init__(
        self, config: RunConfig, model: str, prompts: Sequence[Prompt], tokens: Any
    ) -> None:
        self.config, self.model, self.prompts, self.tokenizer = config, model, prompts, tokens
        self.directory = RunDirectory.of(config)
        self._version, self._began = 0, clock.now()
        self._rollouts = self._tokens = 0

    def rate_factor(self, step: int) -> float:
        """Return the factor on the learning rate at a step, by the recipe's schedule."""
        return rate_factor(self.config.learner.schedule, step, self.config.steps)

    def state(self, settings: object, packages: Sequence[str]) -> None:
        """Store the settings of the peer and the versions of packages."""
        versions = {name: version(name) for name in packages}
        text = json.dumps({"versions": versions, "settings": settings}, default=str)
        (self.directory.path / SETTINGS).write_text(text)

    def begin(self) -> None:
        """Note the begin of a step, which generates and trains."""
        self._began = clock.now()

    def rewards(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], answers: Sequence[str]
    ) -> list[float]:
        """Return the reward of each completion, token ids with the end token, and count them."""
        self._rollouts += len(completions)
        self._tokens += sum(map(len, completions))
        eos = self.tokenizer.eos_token_id
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        ends = [FinishReason.STOP if eos in ids else FinishReason.LENGTH for ids in completions]
        facts = [{"finish_reason": end} for end in ends]

        async def score_all() -> list[float]:
            rows = zip(prompts, texts, answers, facts, strict=True)
            return [await last_answer(*row) for row in rows]

        return asyncio.run(score_all())

    def end(self, model: Callable[[], Any]) -> None:
        """Write the row of a trained batch, and where it is due the model that `model` returns."""
        row = {"version": self._version, "wait_started_at": self._began}
        row |= {"step_finished_at": clock.now(), "rollouts_trained": self._rollouts}
        append_rows(self.directory.path / BATCHES, [row | {"tokens_trained": self._tokens}])
        self._version += 1
        self._rollouts = self._tokens = 0
        last = self._version == self.config.steps
        if last or self._version % self.config.learner.checkpoint_every == 0:
            folder = self.directory.checkpoints / f"v{self._version:06d}"
            model().save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


@contextmanager
def peer_run(peer: str, recipe: str) -> Iterator[PeerRun]:
    """Make the folder of a recipe's run; the block imports the peer and trains to the last step."""
    config = RunConfig.model_validate_json(Path(recipe).read_text())
    inputs = load_inputs(config)
    prompts = inputs.prompts.source.next(config.steps * config.prompts.groups_per_batch)
    tokenizer = AutoTokenizer.from_pretrained(inputs.model_path)
    run = PeerRun(config, str(inputs.model_path), prompts, tokenizer)
    sys.path.insert(0, str(folder_of(peer)))
    with run.directory.created(config, replace=False):
        yield run
        if not (run.directory.checkpoints / f"v{config.steps:06d}").exists():
            sys.exit(f"{peer} stopped before batch {config.steps}")
        run.directory.summary_file.write_text(json.dumps({"status": "done"}) + "\n")
