"""Settings that DeepSpeed cannot follow are refused; ranks share cores equally."""

import pytest
from pydantic import ValidationError

from learner.config.learner import LearnerConfig
from learner.config.lora import LoraConfig
from learner.config.supervised import RewardTrainingConfig, SftConfig

MUON = {"optimizer": "muon"}
OWN_CRITIC = {"advantage": "gae", "loss": "ppo"}
ONE = {"path": "t"}
TEACHER = {"teachers": [ONE]}
FORWARD = {"divergence": "forward_kl", "top_k": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_optimizer": True, "zero_stage": 0}, "offload_optimizer = true needs zero_stage"),
        ({"optimizer": "muon", "zero_stage": 3}, "use zero_stage 0, 1 or 2"),
        ({"optimizer": "muon", "offload_optimizer": True}, "without offload_optimizer, or adamw"),
        ({"optimizer": "muon", "zero_stage": 1}, "use gradient_clipping = 0, or zero_stage = 0"),
        ({"optimizer": "muon", "zero_stage": 0}, "needs muon_learning_rate, which has no default"),
        ({"dtype": "bfloat16", "zero_stage": 0}, "needs zero_stage >= 1, not 0"),
        ({"lora": {}, "optimizer": "muon", "zero_stage": 0}, "an adapter trains their factors"),
        ({"lora": {"targets": []}}, "at least 1 item"),
        (OWN_CRITIC | {"critic": MUON | {"lora": {}}}, r"muon.* with a section .critic.lora."),
        ({"critic": {"lora": {}, "shared": True}}, "with a section .critic.lora."),
        ({"loss": "ppo", "correction": "tis"}, "or recompute_proximal = true"),
        ({"zero_node_ranks": 8, "ranks": 16}, "it needs zero_stage = 3, which shares out weights"),
        ({"zero_node_ranks": 8, "ranks": 12, "zero_stage": 3}, "such as ranks = 16; or leave it"),
        ({"keep_checkpoints": 0}, "greater than or equal to 1"),
        ({"distillation": {"teachers": []}}, "at least 1 item"),
        ({"distillation": TEACHER | {"coefficient": 0}}, "greater than 0"),
        ({"distillation": TEACHER | {"beta": 1.0}}, "less than 1"),
        ({"distillation": {"teachers": [ONE, ONE]}}, "teachers has t more than once"),
        ({"distillation": TEACHER | FORWARD}, 'set top_k to 1 or more, or divergence = "reverse_'),
        ({"distillation": TEACHER, "drop_tied": True}, "whose teachers tell of every rollout"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "critic", "message"),
    [
        ({"zero_stage": 3}, MUON, 'critic.optimizer = "muon" with zero_stage = 3'),
        ({"offload_optimizer": True}, MUON, "without offload_optimizer, or adamw"),
        ({"zero_stage": 1}, MUON, "critic.gradient_clipping = 1: under ZeRO"),
        ({"zero_stage": 0}, MUON, "needs critic.muon_learning_rate, which has no default"),
    ],
)
def test_the_optimizer_of_a_critic_is_held_to_what_deepspeed_can(settings, critic, message):
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(advantage="gae", critic=critic, **settings)
    LearnerConfig(advantage="gae", critic={**critic, "shared": True}, **settings)
    LearnerConfig(advantage="gae", critic={}, **settings)


def test_only_warm_starts_have_a_rate_of_muon_by_default():
    assert SftConfig(demonstrations="x", optimizer="muon").muon_learning_rate == 0.02
    given = LearnerConfig(optimizer="muon", muon_learning_rate=1e-3, zero_stage=0)
    assert given.muon_learning_rate == 1e-3


def test_a_warm_start_in_bfloat16_needs_zero_too():
    with pytest.raises(ValidationError, match="needs zero_stage >= 1"):
        SftConfig(demonstrations="x", dtype="bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"demonstrations": []}, "at least 1 item"),
        ({"demonstrations": [{"source": "x", "weight": 0}]}, "entry 1.*weight"),
        ({"demonstrations": [{"source": "x", "weight": 1e308}]}, "entry 1.*weight"),
        ({"demonstrations": [{"source": "x", "weight": float("nan")}]}, "entry 1.*weight"),
        ({"demonstrations": [{"source": "x"}, {"source": "y", "wieght": 1}]}, "entry 2.*'weight'"),
        ({"demonstrations": [{"weight": 1}]}, "entry 1.*source"),
        ({"demonstrations": [{"source": "x"}], "options": {"split": "a"}}, "give each source its"),
        ({"heldout": 0}, "greater than or equal to 1"),
        ({"heldout": 9, "heldout_options": {"split": "test"}}, "no effect with heldout = 9"),
        ({"eval_every": 5}, "measures nothing without heldout"),
    ],
)
def test_a_warm_start_refuses_keys_without_effect(settings, message):
    with pytest.raises(ValidationError, match=message):
        SftConfig(**{"demonstrations": "x", **settings})


def test_names_alone_may_be_in_the_list_of_demonstrations():
    listed = SftConfig(demonstrations=["a.jsonl", {"source": "b.jsonl", "weight": 2}]).parts
    assert [(part.source, part.options, part.weight) for part in listed] == [
        ("a.jsonl", {}, 1.0), ("b.jsonl", {}, 2.0),
    ]  # fmt: skip


def test_a_separator_of_steps_is_for_process_reward_models_alone():
    RewardTrainingConfig(pairs="x", separator=";", kind="process")
    with pytest.raises(ValidationError, match='separator is for kind = "process" alone'):
        RewardTrainingConfig(pairs="x", separator=";")


def test_models_of_the_objective_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    one = {"path": "~/m"}
    given = {"advantage": "gae", "loss": "ppo", "critic": one, "kl": {"reference": "~/m"}}
    config = LearnerConfig(**given, distillation={"teachers": [one]})
    named = (config.critic.path, config.kl.reference, config.distillation.teachers[0].path)
    assert {*named} == {"/home/me/m"}


def test_the_reference_of_an_adapter_is_its_base_unless_it_is_another_or_moves():
    with_kl = {"lora": {}, "kl": {"coefficient": 0.1}}
    assert not LearnerConfig(**with_kl).holds_reference
    assert LearnerConfig(kl={}).holds_reference
    assert LearnerConfig(lora={}, kl={"reference": "other/model"}).holds_reference
    assert LearnerConfig(lora={}, kl={"refresh_every": 5}).holds_reference
    assert not LearnerConfig(lora={}).holds_reference


def test_the_folder_of_an_adapter_is_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LoraConfig(path="adapter").path == str(tmp_path / "adapter")
    assert LoraConfig(path=str(tmp_path)).path == str(tmp_path)


def test_the_scale_of_an_adapter_is_that_of_the_paper_or_of_rslora():
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


def test_several_steps_a_batch_use_the_proximal_policy_unless_told_otherwise():
    assert LearnerConfig(minibatches=2, epochs=3).steps_per_batch == 6
    assert LearnerConfig(minibatches=2, correction="tis").uses_proximal
    assert not LearnerConfig().uses_proximal
    assert not LearnerConfig(epochs=2, recompute_proximal=False).uses_proximal


def test_a_loss_without_a_ratio_keeps_the_behaviour_policy_as_its_anchor():
    several = {"loss": "reinforce", "epochs": 2}
    assert not LearnerConfig(**several, correction="tis").uses_proximal
    assert LearnerConfig(**several, recompute_proximal=True).uses_proximal


def test_weights_are_shared_out_within_nodes_where_ranks_are_on_several():
    layouts = {ranks: LearnerConfig(ranks=ranks, zero_stage=3, zero_node_ranks=8).ranks_of_node
               for ranks in (1, 2, 8, 16, 32)}  # fmt: skip
    assert layouts == {1: None, 2: None, 8: None, 16: 8, 32: 8}
    assert LearnerConfig(ranks=32, zero_stage=3).ranks_of_node is None


@pytest.mark.parametrize(
    ("cores", "ranks", "shares", "threads", "cpus"),
    [
        ("0-3", 2, [[0, 1], [2, 3]], 2, 2),
        ("0-3", 1, [[0, 1, 2, 3]], 4, 4),
        ("1", 2, [[1], [1]], 1, 0.5),
        (None, 2, [None, None], 1, 1),
    ],
)
def test_ranks_share_the_cores(cores, ranks, shares, threads, cpus):
    config = LearnerConfig(cores=cores, ranks=ranks)
    assert [config.cores_of_rank(rank) for rank in range(ranks)] == shares
    assert (config.threads_of_rank, config.cpus_of_rank) == (threads, cpus)
    assert config.model_copy(update={"threads": 7}).threads_of_rank == 7


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ("0-2", "3 cores, which ranks = 2 cannot share equally"),
        ("5-2", "'5-2' is empty"),
        ("5-2,8", "'5-2' is empty; a range begins with its first core"),
    ],
)
def test_cores_that_cannot_be_shared_are_refused(cores, message):
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(cores=cores, ranks=2)
