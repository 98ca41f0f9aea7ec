"""Predictions for shipped recipes by their models' published shapes, and refusals."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.config.loader import load_recipe
from deploy.planner.byte_counts import GIB
from deploy.planner.model_sizes import EngineSizes, ModelSizes, Sizes
from deploy.planner.node_memory import Capacity, on_one_gpu, predict
from deploy.planner.process_memory import (
    CONTEXT,
    DRIVER_BASE,
    ENGINE_BASE,
    GPU_BASE,
    LEARNER_BASE,
    OWN_IMPORT,
    Process,
    total,
)
from deploy.planner.remedies import fitting, remedies
from deploy.preflight.memory_check import check_memory
from headway.errors import InputError
from headway.roles import Role
from weight_sync.direct.publisher import SPARE_SHARE
from weight_sync.vllm.device_memory import CHUNK_BYTES

SHAPES = Path(__file__).parent / "shapes"
BILLION = 10**9
MODEL = ModelSizes(
    parameters=BILLION, trained=BILLION, largest_layer=BILLION // 10, largest_tensor=BILLION // 10,
    activations=4 * GIB, passing=GIB,
)  # fmt: skip
SERVED = EngineSizes(
    itemsize=2, kv_token=10_000, kv_heads=2, workers=(1, 2, 4), vocabulary=1000, context=2048,
    cpu_cache=GIB, packed=True,
)  # fmt: skip
SHARE, WORKERS = "actors.gpu_memory_utilization", "actors.tensor_parallel_size"
SIZES = Sizes(policy=MODEL, critic=None, served=SERVED, longest=2048)


def shipped(name, model, *overrides):
    return load_recipe(name, [f"model.path={SHAPES / model}", *overrides])


def checked(config):
    output = io.StringIO()
    return check_memory(config, Console(file=output, width=300)), output.getvalue()


@pytest.mark.parametrize(
    ("name", "model", "learner", "actor", "node"),
    [
        ("gsm8k_qwen_1gpu", "qwen2.5-0.5b", 11.3, 8.7, 18.9),
        ("gsm8k_qwen7b_lora_1gpu", "qwen2.5-7b", 21.3, 40.5, 37.8),
        ("gsm8k_qwen_8gpu", "qwen2.5-1.5b", 67.6, 75.0, 68.4),
        ("gsm8k_qwen7b_8gpu", "qwen2.5-7b", 57.1, 70.5, 238.1),
        ("gsm8k_qwen7b_2nodes", "qwen2.5-7b", 42.8, 70.5, 305.2),
        pytest.param(
            *("gsm8k_qwen32b_8nodes", "qwen2.5-32b", 53.7, 56.3, 372.4), marks=pytest.mark.slow
        ),
    ],
)
def test_a_shipped_recipe_fits_on_the_machines_that_it_names(name, model, learner, actor, node):
    config = shipped(name, model)
    prediction, text = checked(config)
    rank, engine = prediction.processes
    assert total(rank.device) / GIB == pytest.approx(learner, abs=0.1)
    assert total(engine.device) / GIB == pytest.approx(actor, abs=0.1)
    assert max(total(item.parts) for item in prediction.nodes) / GIB == pytest.approx(
        node, rel=0.02
    )
    assert f"of {config.deploy.node.gpu_gib:.1f}" in text
    assert f"of {config.deploy.node.memory_gib:.1f}" in text


def test_a_kv_cache_of_eight_bits_holds_twice_the_rollouts():
    half = "actors.vllm_options={kv_cache_dtype='fp8_e4m3'}"
    for settings, rollouts in ((), 151), ((half,), 303):
        text = checked(shipped("gsm8k_qwen_1gpu", "qwen2.5-0.5b", *settings))[1]
        assert f"KV cache for {rollouts} rollouts" in text


def recipe(*overrides):
    return load_recipe("gsm8k_qwen_8gpu", ["learner.ranks=2", "learner.zero_stage=2", *overrides])


GIB_PASSING = 1.1 * 5 * GIB
"""Activations and head of `MODEL`, and a tenth for fragments."""


@pytest.mark.parametrize(
    ("overrides", "critics", "a_weight", "a_weight_on_the_host"),
    [
        # Bytes for each weight: of the model in bfloat16, gradients, master weights and two moments
        # in float32, by the shares of 2 ranks; then buckets of a tenth of the weights, of which the
        # next one fills meanwhile.
        ((), 0, 2 + 2 + 2 + 4 + 1.1 * 1.0, 2),
        (("learner.ranks=8",), 0, 2 + (4 + 4 + 8) / 8 + 1.1 * 1.0, 2),
        (("learner.ranks=8", "learner.zero_stage=1"), 0, 2 + 4 + (4 + 8) / 8 + 1.1 * 0.6, 2),
        # ZeRO 3 on 4 ranks, of which two share out a copy within their node:
        (
            ("learner.ranks=4", "learner.zero_stage=3", "learner.zero_node_ranks=2"),
            0, 2 / 2 + (2 + 4 + 4 + 8) / 4 + 1.1 * (0.1 * 10 + 2 * (0.05 + 0.1)), 2 / 4 + 2 / 2,
        ),
        # ZeRO 3 on 4 ranks: a bucket of twice the float32 sums, and a layer and a twentieth of the
        # model gathered; loading, a rank holds its share.
        (
            ("learner.ranks=4", "learner.zero_stage=3"),
            0, (2 + 4 + 4 + 8) / 4 + 1.1 * (0.1 * 10 + 2 * (0.05 + 0.1)), 2 / 4,
        ),
        # Offloaded: weights and gradients on the device; on the host master weights and moments,
        # gradients to step by and weights as stepped; on both a buffer of the largest tensor.
        (
            ("learner.offload_optimizer=true",),
            0, 2 + 4 / 2 + 2 * 0.1 + 1.1 * 1.0, (4 + 8 + 4 + 2) / 2 + 2 * 0.1,
        ),
        (
            ("learner.offload_optimizer=true", "learner.ranks=4"),
            0, 2 + 4 / 4 + 2 * 0.1 + 1.1 * 1.0, (4 + 8 + 4 + 2) / 4 + 2 * 0.1,
        ),
        # A critic of the same size has states of its own; the two pass one after the other.
        ((), 1, 2 * (2 + 2 + 2 + 4) + 1.1 * 1.0, 2),
        (
            ("learner.offload_optimizer=true",),
            1, 2 * (2 + 4 / 2 + 2 * 0.1) + 1.1 * 1.0, 2 * ((4 + 8 + 4 + 2) / 2 + 2 * 0.1),
        ),
        # A reference has its weights.
        (("learner.kl.coefficient=0.1",), 0, 2 + 2 + 2 + 2 + 4 + 1.1 * 1.0, 2),
        # Deltas are made on the host.
        (("weight_sync.codec=delta",), 0, 2 + 2 + 2 + 4 + 1.1 * 1.0, 2),
    ],
)  # fmt: skip
def test_a_rank_needs_what_its_parts_add_up_to(overrides, critics, a_weight, a_weight_on_the_host):
    sizes = replace(SIZES, critic=MODEL if critics else None)
    config = recipe(*overrides)
    rank, actor = predict(config, sizes, Capacity()).processes
    assert rank.count == config.learner.ranks
    assert total(rank.device) == pytest.approx(CONTEXT + GIB_PASSING + a_weight * BILLION)
    libraries = LEARNER_BASE + GPU_BASE
    copied = (1 + critics) * (4 + 8) / config.learner.ranks  # for a checkpoint
    assert total(rank.host) == pytest.approx(libraries + (a_weight_on_the_host + copied) * BILLION)
    deltas = config.weight_sync.codec == "delta"
    assert rank.first == {
        "versions": (3 if deltas else 2) * 2 * BILLION,
        "checkpoint of the model": (1 + critics) * 2 * BILLION,
    }
    assert actor.host.get("base of deltas", 0) == deltas * 2 * BILLION


def test_nccl_sends_from_the_gpu_if_two_versions_fit_beside_a_tenth_and_the_note_has_both_pauses():
    config = recipe("weight_sync.transport=nccl")
    [rank, _] = predict(config, SIZES, Capacity()).processes
    assert rank.first["versions"] == 2 * 2 * BILLION
    least = (total(rank.device) + 2 * 2 * BILLION) / (1 - SPARE_SHARE)
    for card, versions, note in [
        (least + 1, 1, "sends from the GPU: engines stand still for about 0.05 s an update (0.1 s"),
        (least - 1, 2, "sends from the host: engines stand still for about 0.1 s an update (0.05"),
        (None, 2, "nccl sends from the host"),
    ]:
        [rank, _] = predict(config, SIZES, Capacity(gpu=card)).processes
        assert rank.first["versions"] == versions * 2 * BILLION
        assert note in rank.note


def test_a_node_has_each_of_its_ranks_and_engines_and_the_first_ranks_copies():
    [node] = predict(recipe("learner.ranks=3", "actors.count=2"), SIZES, Capacity()).nodes
    checkpoint = (4 + 8) * BILLION // 3
    learner = 3 * (LEARNER_BASE + GPU_BASE + 2 * BILLION + checkpoint) + (2 * 2 + 2) * BILLION
    engines = 2 * (ENGINE_BASE + OWN_IMPORT + GPU_BASE + 2 * BILLION + 2 * CHUNK_BYTES)
    assert total(node.parts) == learner + engines + DRIVER_BASE + 2 * 2 * BILLION


def test_an_adapter_takes_states_versions_and_checkpoints_of_its_own_size_and_no_reference():
    factors = BILLION // 100
    sizes = replace(SIZES, policy=replace(MODEL, trained=factors, largest_adapted=1000))
    config = recipe("learner.lora.rank=8", "learner.kl.coefficient=0.1", "learner.zero_stage=1")
    prediction = predict(config, sizes, Capacity())
    rank, actor = prediction.processes
    states = ("gradients", "optimizer", "master weights")
    assert [rank.device[name] for name in states] == [4 * factors, 4 * factors, 2 * factors]
    assert rank.device["weights"] == 2 * BILLION
    assert "reference" not in rank.device
    assert rank.first["versions"] == 2 * 2 * factors
    assert actor.mapped == {"staged version": 2 * factors, "model folder": 2 * BILLION}
    assert actor.host["merging"] == 8 * 1000
    saves = config.learner.keep_checkpoints + 1
    assert prediction.checkpoints == saves * 14 * factors
    critic = recipe("learner.advantage=gae", "learner.loss=ppo", "learner.critic.lora.rank=8")
    both = replace(SIZES, critic=sizes.policy)
    assert predict(critic, both, Capacity()).checkpoints == saves * 14 * (BILLION + factors)
    own = recipe("learner.lora.rank=8", "learner.kl.reference=other/model")
    assert predict(own, sizes, Capacity()).processes[0].device["reference"] == 2 * BILLION


@pytest.mark.parametrize(("stage", "share"), [(1, 1), (3, 4)])
def test_teachers_of_any_size_have_their_weights_and_what_they_tell_of_a_batch(stage, share):
    large = replace(MODEL, parameters=7 * BILLION)
    layout = ("learner.ranks=4", f"learner.zero_stage={stage}")
    named = "learner.distillation.teachers=[{path='a'},{path='b'}]"
    sizes = replace(SIZES, teachers=(MODEL, large))
    rank, _ = predict(recipe(*layout, named), sizes, Capacity()).processes
    plain, _ = predict(recipe(*layout), SIZES, Capacity()).processes
    scores = 8 * 64 * 2048 * plain_rollouts()
    assert rank.device["teachers"] == 8 * 2 * BILLION / share
    assert total(rank.device) - total(plain.device) == 8 * 2 * BILLION / share + 2 * scores
    assert total(rank.host) - total(plain.host) == 2 * 2 * scores
    whole = recipe(*layout, named, "learner.distillation.top_k=10000")
    told = predict(whole, sizes, Capacity()).processes[0].device["scores of teachers"]
    assert told == 2 * scores / 64 * SERVED.vocabulary


def plain_rollouts():
    prompts = recipe().prompts
    return prompts.groups_per_batch * prompts.group_size


@pytest.mark.parametrize(
    ("gpus", "overrides", "engines"),
    [(8, (), 4), (8, ("actors.count=3",), 3), (6, (), 2), (4, (), 0), (None, (), 0),
     (8, ("deploy.placement.actors.labels.pool=far",), 0)],
)  # fmt: skip
def test_engines_without_a_placement_take_the_gpus_that_the_learner_leaves(
    gpus, overrides, engines
):
    cluster = ("deploy.ray_address=auto", "weight_sync.transport=object_store")
    config = recipe("learner.ranks=4", "actors.count=8", *cluster, *overrides)
    node = predict(config, SIZES, Capacity(gpus=gpus)).nodes[0]
    actors = [item for item in node.processes if item.role == "actor"]
    assert sum(item.count for item in actors) == engines
    assert (f"{engines} × actor" in node.parts) == (engines > 0)


def lacks(config, **capacity):
    return [lack.text for lack in predict(config, SIZES, Capacity(**capacity)).lacks]


def test_what_is_not_known_of_the_machines_is_not_compared():
    assert not lacks(recipe())
    [gpu] = lacks(recipe(), gpu=12.0 * GIB)
    assert "a GPU of the learner has 12.0 GiB" in gpu
    [host] = lacks(recipe(), host=10.0 * GIB)
    assert "the node has 10.0 GiB of memory" in host


@pytest.mark.parametrize(
    ("engines", "share", "enough", "text"),
    [
        (1, 0.5, 45.0, "learner and actor share a GPU of 38.0 GiB"),
        (2, 0.25, 60.0, "learner and 2 × actor share a GPU of 38.0 GiB"),
    ],
)
def test_every_process_that_shares_a_gpu_is_added_up(engines, share, enough, text):
    shared = recipe(
        "learner.ranks=1", f"actors.count={engines}", "learner.gpus=0.5", f"actors.gpus={share}",
        f"actors.gpu_memory_utilization={0.4 / engines}",
    )  # fmt: skip
    assert not lacks(shared, gpu=enough * GIB)
    assert text in lacks(shared, gpu=38.0 * GIB)[-1]


@pytest.mark.parametrize(
    ("learner", "engine", "count", "shared"),
    [
        (0.5, 0.5, 1, [(1, 1)]),
        (0.5, 0.25, 2, [(1, 2)]),
        (0.5, 0.25, 1, [(1, 1)]),
        (0.7, 0.1, 8, [(1, 3), (0, 5)]),
        (0.9, 0.5, 3, [(0, 2)]),
        (1, 0.25, 6, [(0, 4)]),
        (0.5, 1, 2, []),
        (0.5, 0.3, 2, [(1, 1), (0, 1)]),
    ],
)
def test_a_gpu_is_shared_by_as_many_engines_as_it_holds(learner, engine, count, shared):
    roles = Process(Role.LEARNER, 1, {}, {}, learner), Process(Role.ACTOR, count, {}, {}, engine)
    numbers = [{item.role: item.count for item in sharing} for sharing in on_one_gpu(roles)]
    assert [(n.get("learner", 0), n.get("actor", 0)) for n in numbers] == shared


def test_more_gpus_than_a_node_has_are_refused():
    [text] = lacks(recipe("learner.ranks=5", "actors.count=4"), gpu=80.0 * GIB, gpus=8)
    assert text == "the node has 8 GPUs, and needs 9"
    shares = recipe(
        "learner.ranks=1", "actors.count=3", "actors.gpus=0.6", "learner.gpus=0.4",
        "actors.gpu_memory_utilization=0.5",
    )  # fmt: skip
    [text] = lacks(shares, gpus=2)
    assert text == "the node has 2 GPUs, and needs 3"  # each share lies on one
    assert not lacks(shares, gpus=3)


def test_an_engine_needs_the_cache_of_one_rollout():
    [text] = lacks(recipe("learner.gpus=0"), gpu=2.0 * GIB)
    assert "a GPU of the actor has 2.0 GiB" in text
    [text] = lacks(recipe(f"{SHARE}=0.03"), gpu=80.0 * GIB)
    assert "an engine may take 2.4 GiB" in text


@pytest.mark.parametrize(
    ("kv_heads", "workers", "share"), [(4, 1, 1), (4, 2, 2), (4, 4, 4), (4, 8, 4), (1, 8, 1)]
)
def test_a_worker_holds_at_least_one_head_of_the_cache_and_all_logits(kv_heads, workers, share):
    served = replace(SERVED, kv_heads=kv_heads)
    config = recipe().updated(actors={"tensor_parallel_size": workers, "gpus": float(workers)})
    actor = predict(config, replace(SIZES, served=served), Capacity()).processes[1]
    assert actor.device["KV cache"] == 10_000 * 2048 / share
    assert actor.device["work"] == 2 * GIB + 12 * config.actors.max_concurrent_rollouts * 1000


@pytest.mark.parametrize(("packed", "weights", "following"), [(True, 3.3, 3.8), (False, 2, 2)])
def test_an_engine_on_a_cpu_holds_packed_copies_where_the_kernels_make_them(
    packed, weights, following
):
    sizes = replace(SIZES, served=replace(SERVED, packed=packed))
    actor = predict(recipe("actors.gpus=0"), sizes, Capacity()).processes[1]
    assert actor.resident["weights"] == weights * BILLION
    assert actor.resident["next version"] == following * BILLION


def test_a_number_of_workers_that_does_not_divide_the_heads_is_refused():
    three = ("actors.tensor_parallel_size=3", "actors.gpus=3", "actors.count=1")
    with pytest.raises(InputError, match=r"28 attention heads .* allowed are 1, 2, 4, 28$"):
        checked(shipped("gsm8k_qwen7b_8gpu", "qwen2.5-7b", *three))


@pytest.mark.parametrize(("workers", "helps"), [((1, 2, 4), 2), ((1, 7), 7), ((1,), None)])
def test_only_numbers_of_workers_that_divide_the_heads_are_named(workers, helps):
    sizes = replace(SIZES, served=replace(SERVED, workers=workers))
    engine = ("actors.gpu_memory_utilization=0.75", "actors.enforce_eager=true")
    config = recipe("actors.count=1", "learner.gpus=0", *engine)
    text = refused(config, measure=lambda config: sizes, gpu=4.0 * GIB)
    if helps is None:
        assert text.startswith("no setting that was tried helps")
    else:
        assert f"actors.tensor_parallel_size = {helps}, actors.gpus = {helps}" in text


@given(share=st.floats(0.01, 1), card=st.floats(1, 200), workers=st.sampled_from([1, 2, 4]))
def test_an_engine_is_accepted_exactly_if_its_share_holds_weights_work_and_a_rollout(
    share, card, workers
):
    keys = {"gpu_memory_utilization": share, "tensor_parallel_size": workers, "gpus": workers}
    prediction = predict(recipe().updated(actors=keys), SIZES, Capacity(gpu=card * GIB))
    actor = prediction.processes[1]
    holds = share * card * GIB >= total(actor.least)
    refused = any(lack.role == "actor" for lack in prediction.lacks)
    assert refused or holds
    assert not refused or not holds or total(actor.device) > card * GIB


def refused(config, *, measure=lambda config: SIZES, **capacity):
    with pytest.raises(InputError) as no:
        fitting(config, measure, Capacity(**capacity))
    return str(no.value).splitlines()[-1]


def test_a_setting_that_helps_is_measured():
    def measure(config):
        kept = (4 if config.learner.activation_checkpointing else 70) * GIB
        return replace(SIZES, policy=replace(MODEL, activations=kept))

    config = recipe("learner.activation_checkpointing=false")
    help_ = "set learner.activation_checkpointing = true, with which it fits"
    assert refused(config, measure=measure, gpu=79.0 * GIB) == help_


@pytest.mark.parametrize(
    ("overrides", "capacity", "named"),
    [
        (["learner.zero_stage=1"], {"gpu": 17.0 * GIB}, "learner.zero_stage = 2"),
        (["actors.count=8"], {"host": 48.0 * GIB}, "actors.count = 2"),
        ([f"{SHARE}=0.03"], {"gpu": 80.0 * GIB}, f"{SHARE} = 0.9"),
        (
            [f"{SHARE}=0.03", "actors.count=1", f"{WORKERS}=4", "actors.gpus=4"],
            *({"gpu": 80.0 * GIB}, f"{SHARE} = 0.9"),
        ),
        (
            [f"{SHARE}=0.03", "actors.count=1", "actors.gpus=0.5", "learner.gpus=0.5",
             "learner.ranks=1"],
            *({"gpu": 80.0 * GIB}, f"{SHARE} = 0.45"),
        ),
        (
            [f"{WORKERS}=2", "actors.gpus=2", "actors.count=1", "learner.gpus=0"],
            *({"gpus": 1}, f"{WORKERS} = 1, actors.gpus = 1.0"),
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_settings_alone_or_together_with_which_the_run_fits(
    overrides, capacity, named
):
    assert refused(recipe(*overrides), **capacity) == f"set {named}, with which it fits"


def test_no_setting_is_named_if_none_helps():
    assert refused(recipe(), gpu=1.0 * GIB).startswith("no setting that was tried helps")


def test_a_run_that_no_setting_makes_fit_is_measured_once():
    measured = []
    refused(recipe(), measure=lambda config: measured.append(config) or SIZES, gpu=1.0 * GIB)
    assert measured == [recipe()]


def test_smaller_microbatches_and_more_ranks_are_tried_before_the_optimizer_is_offloaded():
    config = recipe("learner.microbatch_tokens=8192", "learner.activation_checkpointing=true")
    tried = [
        tuple(*named.items())
        for named, _ in remedies(config, Role.LEARNER, SIZES, 4)
        if all(name.startswith("learner") for name in named)
    ]
    assert tried == [
        ("learner.microbatch_tokens", 4096), ("learner.microbatch_tokens", 2048),
        ("learner.zero_stage", 3), ("learner.ranks", 4), ("learner.offload_optimizer", True),
    ]  # fmt: skip


def test_every_remedy_is_a_valid_recipe():
    for name in ("gsm8k_qwen_8gpu", "gsm8k_qwen_1gpu", "demo"):
        config = load_recipe(name)
        for role in (Role.LEARNER, Role.ACTOR):
            for _, changed in remedies(config, role, replace(SIZES, longest=256), 8):
                type(config).model_validate(changed.model_dump())


@pytest.mark.parametrize(
    ("name", "settings", "learners", "others", "receivers"),
    [
        ("gsm8k_qwen32b_8nodes", (), [("learner", 8)], [("actor", 2)], 4),
        ("gsm8k_qwen7b_2nodes", (), [("learner", 8)], [("actor", 8)], 1),
        (
            "gsm8k_qwen7b_2nodes", ("deploy.placement={}", "learner.ranks=4", "actors.count=9"),
            [("learner", 4), ("actor", 4)], [("actor", 8)], 1,
        ),
        ("gsm8k_qwen_8gpu", (), [("learner", 4), ("actor", 4)], None, 0),
    ],
)  # fmt: skip
def test_actors_of_a_cluster_are_on_nodes_of_their_own(name, settings, learners, others, receivers):
    prediction = predict(load_recipe(name, settings), SIZES, Capacity(gpus=8))
    nodes = [[(item.role, item.count) for item in node.processes] for node in prediction.nodes]
    assert nodes == [learners, *([others] if others else [])]
    assert prediction.receivers == receivers
    assert prediction.version == 2 * BILLION


@pytest.mark.parametrize("eager", [True, False])
def test_captured_cuda_graphs_leave_less_of_an_engine_s_share_to_the_cache(eager):
    config = recipe().updated(actors={"enforce_eager": eager, "gpu_memory_utilization": 0.5})
    device = predict(config, SIZES, Capacity(gpu=80.0 * GIB)).processes[1].device
    assert device.get("CUDA graphs", 0) == (0 if eager else GIB)
    limited = ("weights", "work", "CUDA graphs", "KV cache")
    assert sum(device.get(part, 0) for part in limited) == pytest.approx(40 * GIB)
