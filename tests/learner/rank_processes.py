"""Processes that are ranks of one group, for tests: what each does with the real engine."""

import multiprocessing
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from rollouts import cut_off, random_groups
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from learner import disk_wait
from learner.config.learner import LearnerConfig
from learner.config.optimizer import ScheduleConfig
from learner.engine import checkpoint, gathering
from learner.engine import deepspeed as deepspeed_engine
from learner.engine.process_group import find_store, join, open_store
from learner.errors import TrainingDiverged
from learner.model import forward_check
from learner.model import lora as adapters
from learner.model.ways import Way
from learner.ranks import rank as learner_rank
from learner.ranks.spec import LearnerSpec
from weight_sync.adapter import merged

LIBRARIES = ["deepspeed", "learner.ranks.rank", "transformers.models.llama.modeling_llama"]
STAGES = (0, 1, 2, 3)
BUDGETS = (16, 40, 10_000)
BATCHES = 4
COMBINATIONS = [
    *((stage, "float32") for stage in STAGES),
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


class CapturingCritic(Capturing, deepspeed_engine.DeepSpeedEngine):
    """Of a critic with a backbone of its own."""


def spawn(ranks, work, *args):
    """Run `work(*args)` in as many ranks; return what rank 0 returned, raise what one raised."""
    store = open_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.pt"
        arguments = (ranks, store.port, work, args, file)
        # All ranks are forked from one process that has imported the libraries, and no more.
        multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES)
        torch.multiprocessing.start_processes(
            _enter, arguments, nprocs=ranks, start_method="forkserver"
        )
        return torch.load(file, weights_only=True)


def _enter(rank, ranks, port, work, args, file):
    torch.set_num_threads(1)
    gathering.PERSISTENT_ELEMENTS, deepspeed_engine.GATHER_BYTES = 0, 20_000
    gathering.BUCKET_ELEMENTS = deepspeed_engine.BUCKET_ELEMENTS = 5_000
    join(find_store(("127.0.0.1", port)), rank, ranks)
    results = work(*args)
    if rank == 0:
        torch.save(results, file)
    dist.barrier()


def by_ranks(work, *args):
    """Return what `work` returns with one rank and with two, by number of ranks and key."""
    return {
        (ranks, *(key if isinstance(key, tuple) else (key,))): value
        for ranks in (1, 2)
        for key, value in spawn(ranks, work, *args).items()
    }


def from_all_ranks(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def settings_of(**settings):
    return LearnerConfig(ranks=dist.get_world_size() if dist.is_initialized() else 1, **settings)


def load_rank(model_path, config, checkpoint_path=None, **options):
    """Return a rank whose engines keep their gradients."""
    learner_rank.PolicyEngine, learner_rank.DeepSpeedEngine = CapturingEngine, CapturingCritic
    spec = LearnerSpec(
        config=config, model_path=model_path, checkpoint=checkpoint_path, seed=0, steps=BATCHES,
        **options,
    )  # fmt: skip
    return learner_rank.Rank(spec)


def flat_weights(rank):
    return torch.cat([tensor.double().flatten() for _, tensor in rank.engine.weights()])


def frozen(rank):
    """Return this rank's part of every weight that is not trained."""
    named = rank.engine._engine.module.named_parameters()
    return {
        name: getattr(one, "ds_tensor", one).detach().clone()
        for name, one in named
        if not one.requires_grad
    }


def gradients(model_path, objectives, layouts, version=0, teachers=()):
    """Return gradients, statistics and stepped elements of one batch under each objective.

    By the objective's name, and ZeRO stage and microbatch budget of the layout.
    """
    results = {}
    for name, settings in objectives.items():
        for stage, budget in layouts:
            config = settings_of(zero_stage=stage, microbatch_tokens=budget, **settings)
            rank = load_rank(model_path, config, teachers=teachers)
            before = frozen(rank)
            groups = random_groups(count=5, size=3, version=version)
            statistics = rank.updater.update(groups, version).to_dict()
            statistics["overlaps"] = rank.engine._engine.zero_overlap_comm()
            after = frozen(rank)
            assert all(torch.equal(before[one], after[one]) for one in before)
            engines = [rank.engine] if rank.critic is None else [rank.engine, rank.critic]
            state = rank.engine._engine.basic_optimizer.state.values()
            stepped = sum(one["exp_avg"].numel() for one in state)
            captured = [engine.gradient for engine in engines]
            results[name, stage, budget] = captured, statistics, stepped
            rank.close()
    return results


def probed(model_path):
    """Return by ZeRO stage a probe after an update, its sequences, and the weights it is of."""
    results = {}
    for stage in STAGES:
        rank = load_rank(model_path, settings_of(zero_stage=stage), temperature=0.5)
        rank.updater.update(random_groups(count=5, size=3), 0)
        if rank.engine.rank == 0:
            scores = rank.probe()
            weights = {name: weight.clone() for name, weight in rank.weights()}
            results[stage] = scores, rank.probe_sequences, weights
        elif rank.engine.gathers:
            rank.gather(probe=True)
        dist.barrier()
        rank.close()
    return results


def unpacked(model_path, way, layouts):
    """Return `gradients` of a model whose rows are computed in another way than packed."""

    def choose(copied, described):
        copied.way = Way[way]
        copied.model.set_attn_implementation("sdpa")

    forward_check._choose = choose
    return gradients(model_path, {way: {}}, layouts)


def summed_dtypes(model_path):
    """Return by ZeRO stage the dtypes in which gradients of a model in bfloat16 cross ranks."""
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
        rank = load_rank(model_path, settings_of(zero_stage=stage, dtype="bfloat16"))
        crossed.clear()
        rank.updater.update(random_groups(count=5, size=3), 0)
        results[stage] = sorted(crossed)
        rank.close()
    return results


def within_nodes(model_path, folder):
    """Return what two nodes of half the ranks train, and sizes of groups that gather weights.

    By whether weights are shared out within nodes too: after two steps, and after another from the
    first one's checkpoint.
    """
    results, sizes = {}, set()
    gather = dist.all_gather_into_tensor

    def recording(*args, **options):
        sizes.add(dist.get_world_size(options["group"]))
        return gather(*args, **options)

    dist.all_gather_into_tensor = recording
    for of_node in (None, dist.get_world_size() // 2):
        layout = {"zero_stage": 3, "zero_node_ranks": of_node, "microbatch_tokens": 40}
        # With an epsilon that keeps the rounding of tiny gradients from growing.
        config = settings_of(learning_rate=1e-2, epsilon=1e-3, kl={"coefficient": 0.3}, **layout)
        rank = load_rank(model_path, config)
        rank.updater.update(random_groups(count=5, seed=0), 0)
        rank.engine.capture()(Path(folder) / str(of_node))
        dist.barrier()
        rank.updater.update(random_groups(count=5, seed=1), 1)
        results[of_node is not None, "straight"] = rank.engine.gradient, flat_weights(rank)
        rank.close()
        rank = load_rank(model_path, config)
        sizes.clear()
        rank.engine.load(Path(folder) / str(of_node))
        rank.updater.update(random_groups(count=5, seed=1), 1)
        results[of_node is not None, "resumed"] = rank.engine.gradient, flat_weights(rank)
        results[of_node is not None, "sizes"] = sorted(sizes)
        rank.close()
    return results


def muon_weights(model_path):
    """Return weights after two batches with Muon, by ZeRO stage."""
    results = {}
    for stage in (0, 1, 2):
        muon = {"optimizer": "muon", "muon_learning_rate": 0.02, "gradient_clipping": 0.0}
        rank = load_rank(model_path, settings_of(zero_stage=stage, **muon))
        for version in range(2):
            rank.updater.update(random_groups(count=5, seed=version), version)
        results[stage] = flat_weights(rank)
        rank.close()
    return results


def without_tokens(model_path):
    """Return weights and steps after batches of which one has no token and one a single rollout."""
    results = {}
    for stage in STAGES:
        config = settings_of(
            zero_stage=stage,
            learning_rate=1e-3,
            weight_decay=0.1,
            epsilon=1e-3,  # else the rounding of tiny gradients grows to steps of their own
            mask_truncated=True,
            advantage="reinforce",
            advantage_options={"baseline": "ema"},
            correction="tis",
            loss="reinforce",
        )
        rank = load_rank(model_path, config)
        first, *others = random_groups(seed=3)
        single = replace(first, rollouts=first.rollouts[:1])
        batches = [random_groups(seed=1), cut_off(others), [single], random_groups(seed=2)]
        steps = [rank.updater.update(groups, 0).optimizer_steps for groups in batches]
        results[stage] = flat_weights(rank), steps
        rank.close()
    return results


def one_diverges(model_path):
    """Return what each rank raised when the last rank alone had a loss of NaN, by ZeRO stage."""
    errors = {}
    for stage in STAGES:
        engine = load_rank(model_path, settings_of(zero_stage=stage)).engine
        logprobs = engine.forward(torch.tensor([5, 9, 4, 7]), torch.arange(4)).logprobs
        last = engine.rank == engine.ranks - 1
        engine.backward(logprobs.sum() * (float("nan") if last else 1.0))
        try:
            engine.step()
        except TrainingDiverged as error:
            errors[stage] = str(error)
        engine.close()
    return from_all_ranks(errors)


def plain(**layout):
    """Return settings of several steps a batch, with a running baseline and a schedule."""
    return settings_of(
        **layout,
        learning_rate=1e-3,
        schedule=ScheduleConfig(kind="linear", warmup_steps=3),
        advantage="reinforce",
        advantage_options={"baseline": "ema"},
        minibatches=2,
        correction="tis",
    )


def with_models(**layout):
    """Return settings with a critic, adapted coefficients, and a reference that moves where it can.

    At ZeRO stage 3 settings refuse one that moves.
    """
    moves = {"refresh_every": 1, "refresh_mix": 0.5} if layout["zero_stage"] < 3 else {}
    return settings_of(
        **layout,
        learning_rate=1e-3,
        advantage="gae",
        critic={"learning_rate": 1e-3, "pretrain_batches": 1},
        kl={"coefficient": 0.3, "target": 0.01, **moves},
        entropy={"target": 2.0},
    )


def with_adapter(lora, **layout):
    """Return settings of an adapter whose reference is its base."""
    return settings_of(lora=lora, learning_rate=1e-2, kl={"coefficient": 0.3}, **layout)


def published(model_path, lora):
    """Return what engines merge of the factors that travel, and what the learner has merged."""
    results = {}
    plain_model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    base = [(weight.name, weight.value()) for weight in adapters.weights(plain_model)]
    for stage, dtype in COMBINATIONS:
        rank = load_rank(model_path, with_adapter(lora, zero_stage=stage, dtype=dtype))
        rank.updater.update(random_groups(count=5, size=3), 0)
        factors = {name: tensor.clone() for name, tensor in rank.weights()}
        whole = {name: tensor.clone() for name, tensor in rank.engine.weights()}
        scale = rank.published_adapter.scale
        rank.close()
        results[stage, dtype] = whole, dict(merged(base, factors, scale))
    return results


def resumed(model_path, root, settings, layouts, *more):
    """Return what training on gives, without interruption and from a checkpoint, by layout.

    `settings` is a function of `more`, and of the ZeRO stage and the dtype of a layout.
    """
    results = {}
    for stage, dtype in layouts:
        config = settings(*more, zero_stage=stage, dtype=dtype)
        folder = Path(root) / f"{stage}-{dtype}"
        straight = go_on(load_rank(model_path, config), range(4), folder)
        saved = checkpoint.checkpoint_path(folder, 2)
        again = go_on(load_rank(model_path, config, str(saved)), range(2, 4))
        results[stage, dtype] = straight, again
    return results


def filled(model_path, disk):
    """As `resumed`, on a disk that is full once the model of the checkpoint is written.

    Room comes when a rank has waited for it. Who waited is in `waited-RANK`.
    """
    disk = Path(disk)
    ballast = disk / "ballast"
    if dist.get_rank() == 0:
        left = checkpoint.size(Path(model_path)) + 2**16
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))

    def make_room(seconds):
        (disk / f"waited-{dist.get_rank()}").touch()
        ballast.unlink(missing_ok=True)

    disk_wait.time = SimpleNamespace(sleep=make_room)
    return resumed(model_path, disk, plain, [(2, "float32")])


def go_on(rank, versions, root=None):
    """Train, saving version 2 where there is a folder; return weights and what happened."""
    statistics, draws = [], []
    for version in versions:
        if version == 2 and root is not None:
            save(rank, root)
        groups = random_groups(seed=version, version=version)
        statistics.append(rank.updater.update(groups, version).to_dict())
        draws.append(torch.rand(2).tolist())
    weights = {name: tensor.clone() for name, tensor in rank.engine.weights()}
    rank.close()
    steps = rank.engine.steps_taken
    return {"weights": weights, "statistics": statistics[-2:], "draws": draws[-2:], "steps": steps}


def save(rank, root, version=2):
    """Write a checkpoint, as rank 0 leads it."""
    leads = rank.engine.rank == 0
    if leads:
        checkpoint.prepare(root, version)
    dist.barrier()
    rank.capture()
    rank.write(str(root / f".v{version:06d}.tmp"))
    dist.barrier()
    if leads:
        state = checkpoint.State(
            version=version,
            saved_at=0.0,
            optimizer_steps=rank.engine.steps_taken,
            ranks=rank.config.ranks,
            zero_stage=rank.config.zero_stage,
            dtype=rank.config.dtype,
            cursor=None,
            objective_state=dict(rank.updater.objective.state),
        )
        checkpoint.finish(root, state)
    dist.barrier()
    return checkpoint.checkpoint_path(root, version)
