"""Ranks that count the weights they hold while they load, train, publish and save, for tests."""

import gc
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import from_all_ranks
from rollouts import random_groups
from torch.nn.modules import module as hooks

from learner.config.learner import LearnerConfig
from learner.engine import checkpoint, model_folder
from learner.engine import deepspeed as deepspeed_engine
from learner.ranks.rank import Rank
from learner.ranks.spec import LearnerSpec


def live_elements():
    """Count the elements held by tensors of floating point in this process, views not again."""
    tensors = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    floats = [t for t in tensors if t.is_floating_point() and not t.is_meta]
    stores = [(t.untyped_storage(), t.element_size()) for t in floats]
    return sum({store.data_ptr(): store.nbytes() // size for store, size in stores}.values())


class Peaks:
    """The most elements held in each phase."""

    def __init__(self):
        self.of = {}

    def note(self, phase, elements):
        self.of[phase] = max(self.of.get(phase, 0), elements)

    @contextmanager
    def loading(self):
        """Count whenever a weight is set."""
        before = live_elements()

        def sample(_module, _name, parameter):
            if parameter is not None and not parameter.is_meta:
                self.note("load", live_elements() - before)

        hook = hooks.register_module_parameter_registration_hook(sample)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def passing(self, phase, weights):
        """Count the weights, not activations, whenever a module has been computed or goes back."""

        def sample(_module, _inputs, output):
            self.note(phase, held(weights))
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: self.note(phase, held(weights)))

        hook = hooks.register_module_forward_hook(sample)
        try:
            yield
        finally:
            hook.remove()


def held(weights):
    """Count what is held of parameters that ranks share: parts, and what is gathered."""
    return sum(one.ds_tensor.numel() + one.numel() for one in weights)


def measure(model_path, folder):
    """Save a policy at ZeRO 3; return by rank the largest share of it that was held, by phase."""
    peaks, folder, rank = Peaks(), Path(folder), dist.get_rank()
    elements = sum(t.numel() for t in _whole(model_path).values())
    deepspeed_engine.GATHER_BYTES = model_folder.FILE_BYTES = elements // 25 * 4
    config = LearnerConfig(zero_stage=3, ranks=dist.get_world_size(), learning_rate=1e-3)
    original = deepspeed_engine.check_forward

    def checked(module, run, **options):
        weights = list(module.parameters())
        peaks.note("loaded", held(weights))
        with peaks.passing("check", weights):
            original(module, run, **options)

    deepspeed_engine.check_forward = checked
    with peaks.loading():
        loaded = Rank(LearnerSpec(config=config, model_path=model_path, seed=0, steps=4))
    weights = list(loaded.engine._engine.module.parameters())
    with peaks.passing("train", weights):
        loaded.updater.update(random_groups(count=5, size=3), 0)
    gc.collect()
    idle, own = live_elements(), held(weights)
    for _ in loaded.weights():
        peaks.note("publish", live_elements() - idle + own)
    original_save = model_folder.save_file

    def save(tensors, *args):
        peaks.note("save", live_elements() - idle + own)
        original_save(tensors, *args)

    model_folder.save_file = save
    if rank == 0:
        checkpoint.prepare(folder, 1)
    dist.barrier()
    loaded.capture()
    loaded.write(str(folder / ".v000001.tmp"))
    trained = {name: tensor.clone() for name, tensor in loaded.weights()}
    loaded.close()
    shares = {phase: peak / elements for phase, peak in peaks.of.items()}
    if rank == 0:
        saved = _whole(str(folder / ".v000001.tmp"))
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in trained.items())
    return from_all_ranks(shares)


def score_by_reference(model_path, reference_path):
    """Return by rank figures of a batch with a reference at ZeRO 1 and 3, and what was held."""
    figures, peaks = {}, Peaks()
    for stage in (1, 3):
        kl = {"coefficient": 0.1, "reference": reference_path}
        config = LearnerConfig(zero_stage=stage, ranks=dist.get_world_size(), kl=kl)
        loaded = Rank(LearnerSpec(config=config, model_path=model_path, seed=0, steps=4))
        weights = list(loaded.reference._policy.parameters())
        with peaks.passing("score", weights) if stage == 3 else nullcontext():
            found = loaded.updater.update(random_groups(count=5, size=3), 0).to_dict()
        figures[stage] = {name: found[name] for name in ("loss", "grad_norm", "reference_kl")}
        loaded.close()
    share = peaks.of["score"] / sum(t.numel() for t in _whole(reference_path).values())
    return from_all_ranks({"share": share, "figures": figures})


def _whole(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}
