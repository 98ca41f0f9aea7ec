"""A stage of supervised training: a learner's ranks, trained on other batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway import clock
from learner.config.supervised import RewardTrainingConfig, StageConfig
from learner.engine import checkpoint
from learner.ranks.rank import Rank
from learner.ranks.spec import LearnerSpec
from learner.supervised.row_training import Progress

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage as each of its ranks is given it. It can be pickled."""

    spec: LearnerSpec
    """The ranks, with the model and the checkpoint that they begin with."""
    config: StageConfig | RewardTrainingConfig
    train: Callable[..., Iterator[Progress]]
    """Loop of the stage, such as `train_supervised`."""
    heldout: Sequence[Any] = ()
    """Examples that are never trained, whose loss is measured."""
    rank_type: type[Rank] = Rank
    folder: str
    """Folder that receives the model."""

    def run(self, rank: Rank, batches: Iterator[Sequence[Any]]) -> Iterator[Progress]:
        """Train the batches after those of the checkpoint, and write the model. Collective.

        Yields the progress after each batch.

        Raises:
            TrainingDiverged: The loss or its gradient is not finite.
        """
        config, engine = self.config, rank.engine
        every = config.checkpoint_every if isinstance(config, StageConfig) else None
        earlier = rank.state.totals["tokens"] if rank.state else 0
        for progress in self.train(engine, batches, config, self.heldout):
            if progress.step == config.steps and config.lora and config.dtype == "bfloat16":
                progress = replace(progress, lost_to_rounding=engine.lost_to_rounding())
            yield progress
            due = every and progress.step % every == 0
            if due and progress.step < config.steps:
                state = checkpoint.State(
                    version=progress.step,
                    saved_at=clock.now(),
                    optimizer_steps=progress.step,
                    ranks=engine.ranks,
                    zero_stage=config.zero_stage,
                    dtype=config.dtype,
                    cursor=None,
                    totals={"tokens": earlier + progress.tokens},
                )
                root = Path(self.spec.checkpoints)
                checkpoint.save(engine, root, state, keep=KEPT_CHECKPOINTS)
        engine.save_model(Path(self.folder))
        rank.close()
