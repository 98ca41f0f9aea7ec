"""Ranks that train an adapter are one learner, which leaves all other weights as they are."""

import pytest
import torch
from rank_processes import (
    COMBINATIONS,
    STAGES,
    by_ranks,
    frozen,
    gradients,
    published,
    resumed,
    spawn,
    with_adapter,
)
from rollouts import random_groups
from safetensors import safe_open

from learner.config.learner import LearnerConfig
from learner.config.lora import LoraConfig
from learner.engine import checkpoint
from learner.model import lora
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from learner.ranks.rank import Rank
from learner.ranks.spec import LearnerSpec
from queues.schema import encode
from tests.learner.model.architectures import write
from weight_sync.config import WeightSyncConfig

pytestmark = pytest.mark.deepspeed
FACTORS = 2 * 7 * 2
OBJECTIVES = {
    "kl": {"kl": {"coefficient": 0.3}},
    "held": {"kl": {"coefficient": 0.3, "reference": "the base"}},
    "shared": {"advantage": "gae", "loss": "dapo", "critic": {"shared": True}},
    "own critic": {"advantage": "gae", "loss": "ppo", "critic": {"lora": {"rank": 4}}},
    "pairs": {"advantage": "best_worst", "loss": "dpo", "aggregation": "sequence_mean"},
    "checkpointing": {"activation_checkpointing": True},
}


def base_of(model_path):
    options = LogprobOptions(chunk=4)
    return load_policy(model_path, options, dtype="float32", attention="sdpa").model


@pytest.fixture(scope="module")
def adapter(model_path, tmp_path_factory):
    """Provide settings of an adapter that changes the model's outputs."""
    folder = tmp_path_factory.mktemp("adapter")
    model = base_of(model_path)
    lora.add_adapter(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    make = torch.Generator().manual_seed(1)
    tensors = {
        name: 0.1 * torch.randn(factor.shape, generator=make)
        for name, (factor,), _ in lora.factors(model)
    }
    lora.write_adapter(model, tensors, folder)
    return {"lora": {"rank": 4, "alpha": 8.0, "path": str(folder)}}


@pytest.mark.slow
def test_loss_and_gradient_do_not_depend_on_ranks_and_zero_stage(model_path, adapter):
    objectives = {"": {**adapter, "learning_rate": 1e-2}}
    layouts = [(stage, budget) for stage in STAGES for budget in (16, 10_000)]
    measured = by_ranks(gradients, model_path, objectives, layouts)
    [reference], expected, elements = measured[1, "", 0, 10_000]
    assert (
        elements == len(reference) < 0.5 * sum(p.numel() for p in base_of(model_path).parameters())
    )
    for (ranks, *layout), ([gradient], found, stepped) in measured.items():
        case = f"{ranks} ranks, {layout}"
        assert float((gradient - reference).norm() / reference.norm()) < 1e-6, case
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-7), case
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6), case
        assert stepped <= (elements if layout[1] == 0 else elements / ranks + 64), case


@pytest.mark.slow
def test_every_kind_of_objective_has_one_gradient(model_path, adapter):
    objectives = {name: adapter | settings for name, settings in OBJECTIVES.items()}
    objectives["held"]["kl"] = {"coefficient": 0.3, "reference": model_path}
    whole, cut = (0, 10_000), (3, 40)
    measured = by_ranks(gradients, model_path, objectives, [whole, cut], 1)
    for name in OBJECTIVES:
        [reference, *_], expected, _ = measured[1, name, *whole]
        assert reference.norm() > 0
        for ranks, layout in ((1, cut), (2, whole), (2, cut)):
            [gradient, *_], found, _ = measured[ranks, name, *layout]
            assert float((gradient - reference).norm() / reference.norm()) < 1e-6, name
            for figure in ("loss", "policy_loss", "reference_kl", "value_loss"):
                if figure in expected:
                    assert found[figure] == pytest.approx(expected[figure], rel=1e-5, abs=1e-6)
    without, held = measured[1, "kl", *whole], measured[1, "held", *whole]
    assert without[1]["reference_kl"] == pytest.approx(held[1]["reference_kl"], rel=1e-6) != 0
    assert float((without[0][0] - held[0][0]).norm() / held[0][0].norm()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_on_from_a_checkpoint_of_the_adapter_alone_is_bit_for_bit_the_same(
    model_path, adapter, tmp_path, ranks
):
    arguments = (resumed, model_path, str(tmp_path), with_adapter, COMBINATIONS, adapter["lora"])
    for (stage, dtype), (straight, again) in spawn(ranks, *arguments).items():
        assert again["statistics"] == straight["statistics"]
        for name, tensor in straight["weights"].items():
            assert torch.equal(again["weights"][name], tensor), (stage, dtype, name)
        saved = checkpoint.checkpoint_path(tmp_path / f"{stage}-{dtype}", 2)
        assert not list(saved.glob("model*")), "the base is not in it"
        names = set()
        for file in (saved / "optimizer").glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                names |= {key.rpartition("/")[0] for key in opened.keys()}  # noqa: SIM118
        assert len(names - {""}) == FACTORS
        assert all(".lora_" in name for name in names - {""})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_merge_bit_for_bit_what_the_learner_has_merged(model_path, adapter, ranks):
    results = spawn(ranks, published, model_path, adapter["lora"])
    for (_, dtype), (whole, by_engines) in results.items():
        assert whole.keys() == by_engines.keys()
        for name, tensor in whole.items():
            assert tensor.dtype == getattr(torch, dtype)
            assert torch.equal(by_engines[name], tensor), name


def loaded(model_path, **settings):
    weight_sync = settings.pop("weight_sync", WeightSyncConfig())
    config = LearnerConfig(lora={"rank": 4}, **settings)
    return Rank(
        LearnerSpec(config=config, model_path=model_path, seed=0, steps=4, weight_sync=weight_sync)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_factors_alone_are_trained_and_saved_and_gone_on_with(model_path, tmp_path, stage):
    settings = {"zero_stage": stage, "learning_rate": 1e-2, "kl": {"coefficient": 0.1}}
    rank = loaded(model_path, **settings)
    before = frozen(rank)
    batches = [[encode(group) for group in random_groups(seed=v, version=v)] for v in (0, 1)]
    first = rank.update(batches[0], 0)
    assert first.reference_kl == pytest.approx(0.0, abs=1e-7)
    write_policy = rank.engine.capture()
    last = rank.update(batches[1], 1)
    write_policy(tmp_path)
    assert last.reference_kl > 1e-4
    assert 0 < rank.engine.lost_to_rounding() < 2**-6  # a few units of bfloat16
    assert all(torch.equal(one, before[name]) for name, one in frozen(rank).items())
    trained = {name: tensor.clone() for name, tensor in rank.weights()}
    rank.close()
    assert len(trained) == FACTORS
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    rank = loaded(model_path, **settings)
    rank.engine.load(tmp_path)
    rank.update(batches[1], 1)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rank.weights())
    rank.close()


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_critic_trains_factors_and_its_head_and_goes_on_with_both(model_path, tmp_path, stage):
    critic = {"lora": {"rank": 4}, "learning_rate": 1e-2}
    settings = {"zero_stage": stage, "advantage": "gae", "loss": "ppo", "critic": critic}
    rank = loaded(model_path, **settings)
    named = dict(rank.critic._engine.module.named_parameters())
    trained = {name for name, one in named.items() if one.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"model.score.weight"}
    assert len(trained) == FACTORS + 1
    batches = [[encode(group) for group in random_groups(seed=v, version=v)] for v in (0, 1)]
    rank.update(batches[0], 0)
    write_policy, write_critic = rank.engine.capture(), rank.critic.capture()
    straight = rank.update(batches[1], 1)
    write_policy(tmp_path)
    write_critic(tmp_path / "critic")
    rank.close()
    assert not list((tmp_path / "critic").glob("model*")), "the base is not in it"
    rank = loaded(model_path, **settings)
    rank.engine.load(tmp_path)
    rank.critic.load(tmp_path / "critic")
    again = rank.update(batches[1], 1)
    rank.close()
    assert again == straight


def test_transports_that_write_into_the_engine_are_given_whole_weights(model_path):
    rank = loaded(model_path, weight_sync=WeightSyncConfig(transport="nccl"))
    names = [name for name, _ in rank.weights()]
    rank.close()
    assert rank.published_adapter is None
    assert not [name for name in names if "lora" in name]


def test_of_a_model_with_experts_the_attention_is_adapted(tmp_path):
    write("qwen3_moe", str(tmp_path / "model"))
    rank = loaded(str(tmp_path / "model"))
    names = [name for name, _ in rank.weights()]
    rank.close()
    assert len(names) == 2 * 4 * 2
    assert rank.published_adapter.scale == 8.0
