"""Processes that are ranks of one group, for tests: what each does with the real engine.

Results are written by rank 0 with torch.save, under the keys that the tests look up.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from rollouts import cut_off, random_groups
from torch.utils._pytree import tree_leaves

from learner import disk_wait
from learner.config.learner import LearnerConfig
from learner.config.optimizer import ScheduleConfig
from learner.engine import checkpoint, gathering
from learner.engine import deepspeed as deepspeed_engine
from learner.engine.process_group import find_store, join, open_store
from learner.errors import TrainingDiverged
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from learner.ranks import rank as learner_rank
from learner.ranks.spec import LearnerSpec
from learner.update import Updater

BUDGETS = (16, 40, 10_000)
BATCHES = 4
COMBINATIONS = [
    *((stage, "float32") for stage in (0, 1, 2, 3)),
    *((stage, "bfloat16") for stage in (1, 2, 3)),
]


class Capturing:
    """Keeps the full gradient of the last step, as it is before clipping and the update."""

    def step(self):
        from deepspeed.utils import safe_get_full_grad

        update = self._engine._take_model_step

        def capture(*args, **options):
            parameters = [p for p in self._engine.module.parameters() if p.requires_grad]
            gradients = [safe_get_full_grad(p).double().flatten() for p in parameters]
            self.gradient = torch.cat(gradients)
            return update(*args, **options)

        self._engine._take_model_step = capture
        return super().step()


class CapturingEngine(Capturing, deepspeed_engine.PolicyEngine):
    """Of a policy, with a value head where it has one."""


class CapturingCritic(Capturing, deepspeed_engine.CriticEngine):
    """Of a critic with a backbone of its own."""


def spawn(ranks, work, *args):
    """Run `work(rank, *args)` in as many processes; raise what one of them raised."""
    store = open_store("127.0.0.1")
    torch.multiprocessing.spawn(_enter, (ranks, store.port, work, args), nprocs=ranks)


def _enter(rank, ranks, port, work, args):
    torch.set_num_threads(1)
    gathering.PERSISTENT_ELEMENTS, deepspeed_engine.GATHER_BYTES = 0, 20_000
    join(find_store(("127.0.0.1", port)), rank, ranks)
    work(rank, *args)
    dist.barrier()


def _updater(model_path, config):
    with deepspeed_engine.sharing(config.zero_stage):
        policy = load_policy(
            model_path, LogprobOptions(chunk=64), dtype=config.dtype, attention="sdpa"
        )
    engine = CapturingEngine(
        policy,
        config,
        model_path=model_path,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        total_steps=BATCHES * config.steps_per_batch,
    )
    return Updater(engine, config), engine


def gradients(rank, model_path, file):
    """Write gradient and statistics of one batch at every ZeRO stage and microbatch budget."""
    results = {}
    groups = random_groups(count=5, size=3)
    for stage in (0, 1, 2, 3):
        for budget in BUDGETS:
            config = LearnerConfig(
                zero_stage=stage, microbatch_tokens=budget, ranks=dist.get_world_size()
            )
            updater, engine = _updater(model_path, config)
            statistics = updater.update(groups, 0).to_dict()
            results[stage, budget] = engine.gradient, statistics
            engine.close()
    if rank == 0:
        torch.save(results, file)


def summed_dtypes(rank, model_path, file):
    """Write by ZeRO stage the dtypes in which gradients of a model in bfloat16 cross ranks."""
    crossed, results = set(), {}

    def recording(collective):
        def call(*args, **options):
            for leaf in tree_leaves((args, options)):
                if isinstance(leaf, torch.Tensor) and leaf.numel() > 100:
                    crossed.add(str(leaf.dtype))
            return collective(*args, **options)

        return call

    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        setattr(dist, name, recording(getattr(dist, name)))
    for stage in (1, 2, 3):
        config = LearnerConfig(zero_stage=stage, dtype="bfloat16", ranks=dist.get_world_size())
        updater, engine = _updater(model_path, config)
        crossed.clear()
        updater.update(random_groups(count=5, size=3), 0)
        results[stage] = sorted(crossed)
        engine.close()
    if rank == 0:
        torch.save(results, file)


def muon_weights(rank, model_path, file):
    """Weights after two batches with Muon."""
    results = {}
    for stage in (0, 1, 2):
        config = LearnerConfig(
            optimizer="muon",
            muon_learning_rate=0.02,
            gradient_clipping=0.0,
            zero_stage=stage,
            ranks=dist.get_world_size(),
        )
        updater, engine = _updater(model_path, config)
        for version in range(2):
            updater.update(random_groups(count=5, seed=version), version)
        results[stage] = torch.cat([t.double().flatten() for _, t in engine.weights()])
        engine.close()
    if rank == 0:
        torch.save(results, file)


def without_tokens(rank, model_path, file):
    """Write weights and steps after batches of which one has no token, and one a single rollout."""
    results = {}
    for stage in (0, 1, 2, 3):
        config = LearnerConfig(
            zero_stage=stage,
            ranks=dist.get_world_size(),
            learning_rate=1e-3,
            weight_decay=0.1,
            epsilon=1e-3,  # else the rounding of tiny gradients grows to steps of their own
            mask_truncated=True,
            advantage="reinforce",
            advantage_options={"baseline": "ema"},
            correction="tis",
            loss="reinforce",
        )
        updater, engine = _updater(model_path, config)
        first, *others = random_groups(seed=3)
        single = replace(first, rollouts=first.rollouts[:1])
        batches = [random_groups(seed=1), cut_off(others), [single], random_groups(seed=2)]
        steps = [updater.update(groups, 0).optimizer_steps for groups in batches]
        weights = torch.cat([tensor.double().flatten() for _, tensor in engine.weights()])
        results[(stage,)] = weights, steps
        engine.close()
    if rank == 0:
        torch.save(results, file)


def one_diverges(rank, model_path, folder):
    """Each rank writes what it raised when the last rank alone had a loss of NaN."""
    errors = {}
    for stage in (0, 1, 2, 3):
        config = LearnerConfig(zero_stage=stage, ranks=dist.get_world_size())
        _, engine = _updater(model_path, config)
        logprobs = engine.forward(torch.tensor([5, 9, 4, 7]), torch.arange(4)).logprobs
        last = rank == dist.get_world_size() - 1
        engine.backward(logprobs.sum() * (float("nan") if last else 1.0))
        try:
            engine.step()
        except TrainingDiverged as error:
            errors[stage] = str(error)
        engine.close()
    torch.save(errors, Path(folder) / f"{rank}.pt")


def resumed(rank, model_path, root, file):
    """Weights and statistics of training on, without interruption and from a checkpoint."""
    results = {}
    for stage, dtype in COMBINATIONS:
        config = LearnerConfig(
            zero_stage=stage,
            dtype=dtype,
            ranks=dist.get_world_size(),
            learning_rate=1e-3,
            schedule=ScheduleConfig(kind="linear", warmup_steps=3),
            advantage="reinforce",
            advantage_options={"baseline": "ema"},
            minibatches=2,
            correction="tis",
        )
        folder = Path(root) / f"{stage}-{dtype}"
        straight = _train(rank, model_path, config, folder, [0, 1, 2, 3], load=None)
        again = _train(rank, model_path, config, folder, [2, 3], load=2)
        results[stage, dtype] = straight, again
    if rank == 0:
        torch.save(results, file)


def filled(rank, model_path, disk, file):
    """Fill the disk after the model of a checkpoint is written, with ZeRO 2.

    Room comes when a rank has waited for it. Who waited is in `waited-RANK`.
    """
    disk = Path(disk)
    config = LearnerConfig(zero_stage=2, ranks=dist.get_world_size(), minibatches=2)
    ballast = disk / "ballast"
    if rank == 0:
        left = checkpoint.size(Path(model_path)) + 2**16
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))

    def make_room(seconds):
        (disk / f"waited-{rank}").touch()
        ballast.unlink(missing_ok=True)

    disk_wait.time = SimpleNamespace(sleep=make_room)
    straight = _train(rank, model_path, config, disk, [0, 1, 2, 3], load=None)
    again = _train(rank, model_path, config, disk, [2, 3], load=2)
    if rank == 0:
        torch.save((straight, again), file)


def _train(rank, model_path, config, root, versions, *, load):
    updater, engine = _updater(model_path, config)
    if load is not None:
        folder = checkpoint.checkpoint_path(root, load)
        state = checkpoint.load(engine, folder)
        updater.objective.state.update(state.objective_state)
    statistics, draws = [], []
    for version in versions:
        if version == 2 and load is None:
            _save(rank, root, updater, engine, config)
        groups = random_groups(seed=version, version=version)
        statistics.append(updater.update(groups, version).to_dict())
        draws.append(torch.rand(2).tolist())
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    steps = engine.steps_taken
    engine.close()
    return {"weights": weights, "statistics": statistics[-2:], "draws": draws[-2:], "steps": steps}


def _save(rank, root, updater, engine, config):
    if rank == 0:
        checkpoint.prepare(root, 2)
    dist.barrier()
    checkpoint.capture(engine)(root / ".v000002.tmp")
    dist.barrier()
    if rank == 0:
        state = checkpoint.State(
            version=2,
            saved_at=0.0,
            optimizer_steps=engine.steps_taken,
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            cursor=None,
            objective_state=updater.objective.state,
        )
        assert asdict(state)["optimizer_steps"] == 4
        checkpoint.finish(root, state)
    dist.barrier()


OBJECTIVES = {
    "reference": {"kl": {"coefficient": 0.3}},
    "reward": {"advantage": "rloo", "kl": {"coefficient": 0.3, "placement": "reward"}},
    "critic": {"advantage": "gae", "loss": "ppo", "critic": {}, "positive_nll": 0.1},
    "shared": {"advantage": "gae", "loss": "dapo", "critic": {"shared": True}},
    "entropy": {"entropy": {"coefficient": 0.1}, "aggregation": "prompt_mean"},
    "pairs": {"advantage": "best_worst", "loss": "dpo", "aggregation": "sequence_mean"},
    "decoupled": {"loss": "decoupled_ppo", "drop_tied": True},
    "whitened": {"advantage": "reinforce_pp", "loss": "sapo"},
    "sequences": {
        "advantage": "batch_norm",
        "loss": "gspo",
        "loss_options": {"clip_low": 0.5, "clip_high": 5.0},
        "aggregation": "sequence_mean",
    },
}


def _rank(model_path, config, *, checkpoint_path=None):
    """Return a rank whose engines keep their gradients."""
    learner_rank.PolicyEngine, learner_rank.CriticEngine = CapturingEngine, CapturingCritic
    return learner_rank.Rank(
        LearnerSpec(
            config=config, model_path=model_path, checkpoint=checkpoint_path, seed=0, steps=BATCHES
        )
    )


def objectives(rank, model_path, file):
    """Write gradient and statistics of one batch under every kind of objective."""
    results = {}
    for name, settings in OBJECTIVES.items():
        for stage, budget in ((0, 10_000), (1, 16), (3, 40)):
            config = LearnerConfig(
                zero_stage=stage,
                microbatch_tokens=budget,
                ranks=dist.get_world_size(),
                **settings,
            )
            loaded = _rank(model_path, config)
            report = loaded.updater.update(random_groups(count=5, size=3, version=1), 1)
            engines = [loaded.engine] if loaded.critic is None else [loaded.engine, loaded.critic]
            results[name, stage] = [engine.gradient for engine in engines], report.to_dict()
            loaded.close()
    if rank == 0:
        torch.save(results, file)


def resumed_with_models(rank, model_path, root, file):
    """Weights and statistics with critic, moving reference and adapted coefficients."""
    results = {}
    for stage in (0, 1, 2, 3):
        config = with_models(zero_stage=stage, ranks=dist.get_world_size())
        folder = Path(root) / str(stage)
        straight = go_on(_rank(model_path, config), range(4), rank, folder)
        saved = checkpoint.checkpoint_path(folder, 2)
        loaded = _rank(model_path, config, checkpoint_path=str(saved))
        again = go_on(loaded, range(2, 4), rank, None)
        results[stage] = straight, again
    if rank == 0:
        torch.save(results, file)


def with_models(**layout):
    """Return settings with a critic, adapted coefficients, and a reference that moves where it can.

    At ZeRO stage 3 settings refuse one that moves.
    """
    moves = {"refresh_every": 1, "refresh_mix": 0.5} if layout["zero_stage"] < 3 else {}
    return LearnerConfig(
        **layout,
        learning_rate=1e-3,
        advantage="gae",
        critic={"learning_rate": 1e-3, "pretrain_batches": 1},
        kl={"coefficient": 0.3, "target": 0.01, **moves},
        entropy={"target": 2.0},
    )


def go_on(loaded, versions, rank, root):
    """Trains, saving version 2 where there is a folder."""
    statistics = []
    for version in versions:
        if version == 2 and root is not None:
            _save_rank(loaded, rank, root)
        groups = random_groups(seed=version, version=version)
        statistics.append(loaded.updater.update(groups, version).to_dict())
    weights = {name: tensor.clone() for name, tensor in loaded.engine.weights()}
    loaded.close()
    return {"weights": weights, "statistics": statistics[-2:]}


def _save_rank(loaded, rank, root):
    if rank == 0:
        checkpoint.prepare(root, 2)
    dist.barrier()
    loaded.capture()
    loaded.write(str(root / ".v000002.tmp"))
    dist.barrier()
    if rank == 0:
        state = checkpoint.State(
            version=2,
            saved_at=0.0,
            optimizer_steps=loaded.engine.steps_taken,
            ranks=loaded.config.ranks,
            zero_stage=loaded.config.zero_stage,
            dtype=loaded.config.dtype,
            cursor=None,
            objective_state=loaded.updater.objective.state,
        )
        checkpoint.finish(root, state)
    dist.barrier()
