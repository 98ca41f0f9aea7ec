"""Every fault of the zoo is named within one version, by scores of models in memory."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from tests.weight_sync import zoo
from tests.weight_sync.weight_families import VOCABULARY, build, named_as_in_the_folder
from weight_sync.probe import ProbeCheck, ProbeReport, probe_sequences

SEQUENCES = probe_sequences(SimpleNamespace(vocab_size=VOCABULARY), None)
FAMILIES = {
    "dense": "qwen3, norms of queries and keys, tied",
    "biases": "qwen2, biases and tied",
    "untied": "llama, untied",
    "experts": "qwen3 moe",
}


class Engine:
    """An engine that serves a model as transformers computes it, one sequence after the other."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def report(self, weights, version):
        zoo.load(self.model, weights)
        scores, sampled = [], []
        for sequence in SEQUENCES:
            logits = self.model(torch.tensor([sequence]), use_cache=False).logits[0, :-1].float()
            own = torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence)[1:, None])[:, 0]
            scores += own.tolist()
            sampled.append(scores[-1])
        return ProbeReport(
            source="engine-0", version=version, sequences=SEQUENCES, scores=tuple(scores),
            sampled=tuple(sampled),
        )  # fmt: skip


@dataclass
class Story:
    """Four versions of a learner, and an engine that follows them."""

    family: str
    dtype: str
    size: float
    versions: list
    learned: list
    served: list
    """Reports of an honest engine."""
    engine: Engine


@pytest.fixture(
    scope="module",
    params=[
        ("dense", "float32", 1e-3),
        ("dense", "float32", 1e-5),
        ("dense", "bfloat16", 0.1),
        ("biases", "float32", 1e-3),
        ("untied", "float32", 1e-4),
        ("experts", "float32", 1e-3),
    ],
)
def story(request, tmp_path_factory):
    family, dtype, size = request.param
    models = [
        build(FAMILIES[family], tmp_path_factory.mktemp("model")).to(getattr(torch, dtype))
        for _ in range(2)
    ]
    models[1].set_attn_implementation("eager")  # it rounds in another way than the learner
    weights = named_as_in_the_folder(models[0])
    versions = [{name: weight.clone() for name, weight in weights.items()}]
    for version in range(3):
        versions.append(zoo.stepped(versions[version], size, seed=version))
    learner = zoo.LearnersScores(models[0], SEQUENCES)
    learned = [learner.report(weights, version) for version, weights in enumerate(versions)]
    engine = Engine(models[1])
    served = [engine.report(weights, version) for version, weights in enumerate(versions)]
    return Story(family, dtype, size, versions, learned, served, engine)


@pytest.mark.parametrize("fault", zoo.FAULTS)
def test_a_fault_is_named_within_one_version_and_the_other_engine_is_not(story, fault):
    wrong = zoo.FAULTS[fault](story.versions[2], story.versions[3])
    if not zoo.changes(wrong, story.versions[3]):
        pytest.skip("the model has no such tensors")
    check = ProbeCheck([story.dtype])
    for version in (1, 2):
        check.observe(story.learned[version])
        assert not check.observe(story.served[version]).fails
    check.observe(story.learned[3])
    result = check.observe(story.engine.report(wrong, 3))
    honest = check.observe(replace(story.served[3], source="engine-1"))
    print(
        f"{story.dtype} {story.family}, steps of {story.size}: {result.difference:.2g} nats, "
        f"allowed {result.tolerance:.2g}, honest {honest.difference:.2g}"
    )
    assert result.fails
    assert result.nearest == (2 if zoo.FAULTS[fault] is zoo.old_weights else None)
    assert not honest.fails
