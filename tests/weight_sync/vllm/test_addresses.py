"""Weights keep their addresses over updates, as captured graphs of a GPU need it.

Every family of `weight_families` is loaded by vLLM in this process. Layers are not packed, as on a
GPU, and the device memory is a fake in the host's: the code is that of a GPU but for its copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDeviceMemory
from weight_families import FAMILIES, build, named_as_in_the_folder, staged

from learner.config.lora import LoraConfig
from learner.model.lora import add_adapter, factors, weights
from tests.waiting import until
from tests.weight_sync.conftest import same
from weight_sync.adapter import AdapterForm
from weight_sync.receive.staging import StagedWeights
from weight_sync.vllm import device_memory

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Let vLLM use the weights as they are loaded."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    is_shared = torch.distributed.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        kinds = UnquantizedLinearMethod, UnquantizedEmbeddingMethod, CPUUnquantizedExperts
        for kind in kinds:
            patch.setattr(kind, "process_weights_after_loading", lambda self, layer: None)
        yield
        destroy_model_parallel()
        if not is_shared:
            destroy_distributed_environment()


def load(folder: Path) -> tuple[Any, Any]:
    """Return vLLM's configuration and its model, with the weights of a folder."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_open_port

    arguments = EngineArgs(model=str(folder), dtype="float32", enforce_eager=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            address = f"tcp://127.0.0.1:{get_open_port()}"
            init_distributed_environment(1, 0, address, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        config.compilation_config.static_forward_context.clear()
        return config, get_model(vllm_config=config)


class Learner:
    """A model of a family, as transformers hold it."""

    def __init__(self, family: str, folder: Path, **sizes: int) -> None:
        self.folder = folder
        self.model = build(family, folder, **sizes)

    @contextmanager
    def version(self, number: int) -> Iterator[StagedWeights]:
        """Change the weights, and stage them for an engine."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        with staged(number, named_as_in_the_folder(self.model)) as held:
            yield held

    @contextmanager
    def adapter(self, number: int) -> Iterator[StagedWeights]:
        """Change the factors, and stage them."""
        named = {factor.name: factor.value() for factor in factors(self.model)}
        for tensor in named.values():
            tensor.copy_(torch.randn(tensor.shape))
        with staged(number, named, AdapterForm(scale=0.5)) as held:
            yield held


def engine_of(config: Any, model: Any) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    from weight_sync.vllm.plugin import StagedWeightsEngine, StagingInfo

    engine = StagedWeightsEngine(
        WeightTransferConfig(backend="headway"), config, torch.device("cpu"), model
    )
    engine.init_transfer_engine(StagingInfo())
    engine.memory = FakeDeviceMemory()
    return engine


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def check_loaded_afresh(model: torch.nn.Module, folder: Path) -> None:
    """Check that weights are those that a fresh load of a folder gives."""
    _, fresh = load(folder)
    assert same(model.state_dict(), fresh.state_dict())


def exchange(engine: Any, held: StagedWeights) -> bool:
    """Prepare a version and exchange it; return False if it can only be loaded in a pause."""
    if not engine.prepare(held.manifest):
        return False
    until(engine.prepared)
    return bool(engine.exchange(held.manifest.version))


def reload(engine: Any, held: StagedWeights) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(engine.vllm_config):
        engine.start_weight_update()
        engine.update_weights({"manifest": held.manifest.to_json()})
        engine.finish_weight_update()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_update_moves_a_weight_and_each_leaves_what_a_fresh_load_gives(family, tmp_path) -> None:
    learner = Learner(family, tmp_path / "first")
    config, model = load(learner.folder)
    engine, before = engine_of(config, model), addresses(model)
    exchanged = 0
    for number, by in enumerate((exchange, exchange, reload, exchange)):
        with learner.version(number) as held:
            taken = by(engine, held)
            exchanged += taken is True
            if taken is False:
                reload(engine, held)
        assert addresses(model) == before
    learner.model.save_pretrained(tmp_path / "last")
    check_loaded_afresh(model, tmp_path / "last")
    assert exchanged == (0 if "moe" in family else 3)
    assert engine.memory.copies == exchanged
    assert len(engine.memory.blocks) == (exchanged > 0)
    assert engine.memory.chunks == 2 * (exchanged > 0)


def test_an_adapter_moves_no_weight_and_loads_only_layers_that_it_changes(tmp_path) -> None:
    """Between two of them whole weights are served, after which all layers are loaded again."""
    family = "qwen2, biases and tied"
    learner, plain = Learner(family, tmp_path / "first"), build(family, tmp_path / "last")
    config, model = load(learner.folder)
    engine, before = engine_of(config, model), addresses(model)
    add_adapter(learner.model, LoraConfig(rank=4, alpha=2.0, targets=("q_proj",)), seed=0)
    for number in (0, 1, 2, 4):
        with learner.adapter(number) as held:
            assert exchange(engine, held)
        assert addresses(model) == before
        if number == 2:
            with Learner(family, tmp_path / "other").version(3) as held:
                assert exchange(engine, held)
    first, *partly, full, again = engine.memory.filled
    assert first == full == again
    assert len(partly) == 2
    assert max(partly) < 0.5 * first
    plain.load_state_dict({w.name: w.value() for w in weights(learner.model)}, strict=False)
    plain.save_pretrained(tmp_path / "last")
    check_loaded_afresh(model, tmp_path / "last")


def test_the_served_weights_change_by_nothing_but_the_copy(tmp_path) -> None:
    learner = Learner("qwen2, biases and tied", tmp_path)
    config, model = load(learner.folder)
    engine = engine_of(config, model)
    served = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with learner.version(1) as held:
        assert engine.prepare(held.manifest)
        until(engine.prepared)
    assert same(model.state_dict(), served)
    assert engine.exchange(1)
    assert not torch.equal(model.state_dict()["model.norm.weight"], served["model.norm.weight"])


def test_an_update_takes_at_most_a_tenth_of_a_model_beside_the_staged_version(
    tmp_path, monkeypatch
) -> None:
    """Of host memory: pages that the process touches from the second version on, at their peak."""
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 2**20)
    sizes = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048}
    learner = Learner("qwen2, biases and tied", tmp_path, num_hidden_layers=4, **sizes)
    config, model = load(learner.folder)
    engine = engine_of(config, model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    peaks = []
    for number in range(4):
        with learner.version(number) as held:
            Path("/proc/self/clear_refs").write_text("5")
            before = memory_of_process("VmRSS")
            assert exchange(engine, held)
            peaks.append((memory_of_process("VmHWM") - before) / nbytes)
    print("peaks in models:", peaks)
    assert nbytes > 40e6
    assert max(peaks[1:]) <= 1.1
    assert len(engine.memory.blocks) == 1
    assert engine.memory.chunks == 2


def memory_of_process(name: str) -> int:
    """Return a figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
