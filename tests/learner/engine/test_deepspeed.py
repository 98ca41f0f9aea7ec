"""The real engine against plain torch: same gradient, same steps, whatever the ZeRO stage."""

import threading
from dataclasses import replace

import pytest
import torch

from headway.errors import InputError
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig, ScheduleConfig
from learner.engine.lr_schedule import rate_factor
from learner.engine.optimizer_state import parts_of
from learner.model import lora
from learner.model.logprobs import LogprobOptions
from learner.model.policy import Policy, load_policy
from learner.model.scalar_model import load_scalar_model
from learner.model.ways import Way
from learner.update import values_of
from tests.learner.model.architectures import write
from weight_sync.publish.snapshot import Snapshot

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("one_thread")]

ROWS = [[5, 9, 4, 7, 1], [3, 8, 8, 1], [6, 4, 1]]
CONFIG = OptimizerConfig(
    learning_rate=3e-3,
    weight_decay=0.1,
    epsilon=1e-3,
    gradient_clipping=0.5,
    schedule=ScheduleConfig(kind="linear", warmup_steps=2),
)
STEPS = 4


def policy(model_path, dtype="float32", **options):
    return load_policy(
        model_path,
        LogprobOptions(chunk=4, temperature=0.7),
        dtype=dtype,
        attention="sdpa",
        **options,
    )


def microbatches():
    for row in ROWS:
        yield torch.tensor(row), torch.arange(len(row))


def loss_of(logprobs, step):
    return -(logprobs.sum() * 0.1 * (1 + step))


@pytest.fixture(autouse=True)
def everything_sharded(monkeypatch):
    """Under ZeRO 3 shards even the smallest tensor, and gathers few at once; close all engines."""
    monkeypatch.setattr("learner.engine.gathering.PERSISTENT_ELEMENTS", 0)
    monkeypatch.setattr("learner.engine.deepspeed.GATHER_BYTES", 20_000)
    yield
    while OPENED:
        OPENED.pop().close()


OPENED = []


@pytest.fixture(scope="module")
def reference(model_path):
    """Weights and gradient norms of the same steps in plain torch."""
    model = policy(model_path)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.endswith("proj.weight")]
    others = [p for name, p in named if not name.endswith("proj.weight")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=CONFIG.learning_rate,
        betas=CONFIG.betas,
        eps=CONFIG.epsilon,
    )
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for token_ids, position_ids in microbatches():
            loss_of(model(token_ids, position_ids)[0], step).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate * rate_factor(CONFIG.schedule, step, STEPS)
        optimizer.step()
    return dict(model.model.named_parameters()), norms


def make_engine(model_path, zero_stage, config=CONFIG, dtype="float32", model=None, **options):
    from learner.engine.deepspeed import PolicyEngine, sharing

    if model is None:
        with sharing(zero_stage):
            model = policy(model_path, dtype)
    settings = {"model_path": model_path, "zero_stage": zero_stage, "total_steps": STEPS}
    OPENED.append(PolicyEngine(model, config, **settings, **options))
    return OPENED[-1]


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [(0, "float32"), *((s, d) for s in (1, 2, 3) for d in ("float32", "bfloat16"))],
)
def test_a_step_passes_on_the_clipped_gradient_of_every_parameter_once(
    model_path, zero_stage, dtype
):
    model = policy(model_path)
    for token_ids, position_ids in microbatches():
        loss_of(model(token_ids, position_ids)[0], 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.gradient_clipping)
    engine = make_engine(model_path, zero_stage, dtype=dtype)
    begun = {name: weight.clone() for name, weight in engine.stepped_weights().items()}
    seen = []
    engine.watch_gradients(lambda part: seen.extend((n, g.clone()) for n, g in part.items()))
    for token_ids, position_ids in microbatches():
        engine.backward(loss_of(engine.forward(token_ids, position_ids)[0], 0))
    engine.step()
    assert sorted(name for name, _ in seen) == sorted(dict(model.named_parameters()))
    exact = dtype == "float32"
    for name, gradient in seen:
        wanted = model.get_parameter(name).grad.flatten()
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-4 if exact else 0.1, atol=1e-6 if exact else 5e-3
        )
    assert seen[0][1].dtype == torch.float32
    assert engine.stepped_weights().keys() == begun.keys()
    assert all(w.dtype == torch.float32 for w in engine.stepped_weights().values())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_equal_those_of_plain_torch_at_every_zero_stage(model_path, reference, zero_stage):
    weights, norms = reference
    engine = make_engine(model_path, zero_stage)
    rates = []
    for step in range(STEPS):
        for token_ids, position_ids in microbatches():
            engine.backward(loss_of(engine.forward(token_ids, position_ids)[0], step))
        assert engine.step() == pytest.approx(norms[step], rel=1e-4)
        rates.append(engine.learning_rate)
    trained = {name: tensor.clone() for name, tensor in engine.weights()}
    factors = [rate_factor(CONFIG.schedule, step, STEPS) for step in range(STEPS)]
    assert rates == pytest.approx([CONFIG.learning_rate * factor for factor in factors])
    assert trained.keys() == weights.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name].detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("zero_stage", "optimizer"),
    [*((stage, "adamw") for stage in (0, 1, 2, 3)), *((stage, "muon") for stage in (0, 1, 2))],
)
def test_a_policy_is_saved_as_it_was_captured_though_copied_only_when_a_step_waits_for_it(
    model_path, tmp_path, monkeypatch, zero_stage, optimizer
):
    from learner.engine.deepspeed import PolicyEngine

    waited = threading.Event()
    take, finish_capture = Snapshot.take, PolicyEngine.finish_capture

    def take_late(*arguments, **options):
        if threading.current_thread().name.startswith("capture"):
            assert waited.wait(60), "nothing waits for the copy"
        return take(*arguments, **options)

    def finish_waiting(engine):
        waited.set()
        finish_capture(engine)

    def step(engine):
        engine.backward(loss_of(engine.forward(*next(microbatches()))[0], 0))
        engine.step()

    def weights(engine):
        return {name: tensor.clone() for name, tensor in engine.weights()}

    config = CONFIG.model_copy(update={"optimizer": optimizer})
    engine = make_engine(model_path, zero_stage, config)
    step(engine)
    monkeypatch.setattr(Snapshot, "take", take_late)
    monkeypatch.setattr(PolicyEngine, "finish_capture", finish_waiting)
    write = engine.capture()
    captured = weights(engine)
    step(engine)
    write(tmp_path / "saved")
    trained = weights(engine)
    loaded = dict(policy(str(tmp_path / "saved")).model.named_parameters())
    assert loaded.keys() == captured.keys()
    for name, tensor in captured.items():
        assert torch.equal(tensor, loaded[name])
    engine = make_engine(model_path, zero_stage, config)
    engine.load(tmp_path / "saved")
    step(engine)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in engine.weights())
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    assert not list((tmp_path / "saved").rglob("*.pt")), "nothing in it is a pickle"


def test_a_checkpoint_without_all_of_its_parts_is_refused_with_its_folder(model_path, tmp_path):
    engine = make_engine(model_path, 1)
    engine.capture()(tmp_path)
    [file] = (tmp_path / "optimizer").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{file.name} is damaged") as caught:
        engine.load(tmp_path)
    assert f"the checkpoint {tmp_path} " in str(caught.value)
    file.unlink()
    with pytest.raises(InputError, match=f"{file.name} is missing"):
        engine.load(tmp_path)
    file.write_bytes(whole)
    engine.load(tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("decays", "spared"), [("matrices", 1.0), ("all", 0.5)])
def test_weight_decay_leaves_norms_and_embeddings_alone_unless_told(
    model_path, optimizer, decays, spared
):
    config = OptimizerConfig(
        optimizer=optimizer, learning_rate=0.5, muon_learning_rate=0.5, weight_decay=1.0,
        weight_decay_on=decays, epsilon=1e8,
    )  # fmt: skip
    engine = make_engine(model_path, 0, config)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.backward(0 * engine.forward(*next(microbatches())).logprobs.sum())
    engine.step()
    for name, tensor in engine.weights():
        factor = 0.5 if name.endswith("proj.weight") else spared
        torch.testing.assert_close(tensor, factor * before[name], atol=1e-6, rtol=1e-5)


def test_muon_changes_inner_matrices_by_its_own_rate(model_path):
    before = {name: t.clone() for name, t in policy(model_path).model.named_parameters()}
    config = OptimizerConfig(optimizer="muon", muon_learning_rate=0.02, learning_rate=1e-4)
    engine = make_engine(model_path, 0, config)
    engine.backward(loss_of(engine.forward(*next(microbatches()))[0], 0))
    engine.step()
    change = {n: float((t - before[n]).abs().max().detach()) for n, t in engine.weights()}
    assert change["model.embed_tokens.weight"] == pytest.approx(1e-4, rel=0.1)
    assert change["model.layers.0.mlp.up_proj.weight"] > 1e-3


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_muon_leaves_heads_to_adamw_at_their_own_rate(model_path, zero_stage):
    config = OptimizerConfig(
        optimizer="muon", muon_learning_rate=0.02, learning_rate=1e-4, gradient_clipping=0.0
    )
    shared = policy(model_path)
    shared.add_value_head()
    engine = make_engine(model_path, zero_stage, config, model=shared, rates={"value_head": 5e-3})
    assert not shared.value_head.weight.use_muon
    assert not shared.model.get_input_embeddings().weight.use_muon
    assert shared.model.base_model.layers[0].mlp.up_proj.weight.use_muon
    assert sorted(engine.full_rates) == [1e-4, 5e-3, 0.02]
    out = engine.forward(*next(microbatches()))
    engine.backward((out.values - 1).square().sum() + loss_of(out.logprobs, 0))
    engine.step()
    assert float(shared.value_head.weight.detach().abs().max()) == pytest.approx(5e-3, rel=0.01)
    critic = make_critic(model_path, zero_stage, config=config)
    module = critic._engine.module
    assert not module.model.score.weight.use_muon
    assert module.model.base_model.layers[0].mlp.up_proj.weight.use_muon


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_weights_follow_float32_masters(model_path, reference, zero_stage):
    engine = make_engine(model_path, zero_stage, dtype="bfloat16")
    assert steps_of(engine) == pytest.approx(reference[1], rel=0.03)
    trained = {name: tensor.clone() for name, tensor in engine.weights()}
    for name, tensor in trained.items():
        assert tensor.dtype == torch.bfloat16
        difference = (tensor.float() - reference[0][name]).norm() / reference[0][name].norm()
        assert difference < 0.02, name


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_masters_of_an_adapter_begin_with_its_values_before_they_are_rounded(
    model_path, tmp_path, zero_stage
):
    from learner.engine.deepspeed import sharing

    form = LoraConfig(rank=2, targets=("q_proj",))
    stored = policy(model_path)
    lora.add_adapter(stored.model, form, seed=0)
    for _, (factor,), _ in lora.factors(stored.model):
        torch.nn.init.normal_(factor)
    tensors = {factor.name: factor.value() for factor in lora.factors(stored.model)}
    lora.write_adapter(stored.model, tensors, tmp_path)
    with sharing(zero_stage):
        model = policy(model_path, "bfloat16")
    lora.add_adapter(model.model, form.model_copy(update={"path": str(tmp_path)}), seed=0)
    engine = make_engine(model_path, zero_stage, model=model)
    assert all(torch.equal(t, tensors[name].bfloat16()) for name, t in engine.adapter())
    masters = {part.name: part.values for part in parts_of(engine._engine)}
    factors = zip(lora.factors(engine._engine.module.model), tensors.values(), strict=True)
    names = {id(p): name for name, p in engine._engine.module.named_parameters()}
    for (_, (factor,), _), exact in factors:
        assert torch.equal(masters[f"{names[id(factor)]}/weight"], exact.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_many_micro_batches_in_bfloat16_add_up_in_float32(model_path, zero_stage):
    norms = []
    for count in (1, 256):
        engine = make_engine(model_path, zero_stage, dtype="bfloat16")
        for _ in range(count):
            logprobs = engine.forward(*next(microbatches())).logprobs
            engine.backward(logprobs.sum() / count)
        norms.append(engine.step())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


LAYOUTS = [(0, "float32"), (1, "bfloat16"), (3, "float32")]


@pytest.mark.parametrize(("zero_stage", "dtype"), LAYOUTS)
def test_a_model_that_is_not_computed_as_by_itself_is_refused(tmp_path, zero_stage, dtype):
    write("cohere", str(tmp_path))
    model = policy(str(tmp_path), dtype)
    model.options = replace(model.options, scale=1.0)
    with pytest.raises(InputError, match="changes its logits"):
        make_engine(str(tmp_path), zero_stage, model=model, dtype=dtype)


@pytest.mark.parametrize(("zero_stage", "dtype"), LAYOUTS)
@pytest.mark.parametrize(
    ("name", "way", "of_head"),
    [
        ("minicpm3", Way.PACKED, True),
        pytest.param("phi", Way.PACKED, False, marks=pytest.mark.slow),
        ("lfm2", Way.BESIDE, False),
    ],
)
def test_a_model_trains_in_the_first_way_that_is_exact(
    tmp_path, name, way, of_head, zero_stage, dtype
):
    write(name, str(tmp_path))
    model = policy(str(tmp_path), dtype)
    engine = make_engine(str(tmp_path), zero_stage, model=model, dtype=dtype)
    assert (model.way, model.of_head) == (way, of_head)
    assert min(steps_of(engine)) > 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_experts_are_checked_by_their_derivative_and_then_train(tmp_path, zero_stage, monkeypatch):
    """Where rounding moves the second sequence, as on a GPU; training goes on as it would."""
    from learner.model.forward_comparison import Comparison

    derivatives = []
    original = Comparison._derivative

    def derivative(check):
        derivatives.append(original(check))
        return derivatives[-1]

    monkeypatch.setattr(Comparison, "_derivative", derivative)
    write("qwen3_moe", str(tmp_path))
    module = policy(str(tmp_path))
    forward = Policy.forward

    def rounded(module, token_ids, position_ids, wanted=None):
        logprobs, entropies = forward(module, token_ids, position_ids, wanted)
        return logprobs + 1e-6 * (token_ids[0] % 7) * (position_ids > 0), entropies

    monkeypatch.setattr(Policy, "forward", rounded)
    engine = make_engine(str(tmp_path), zero_stage, model=module)
    assert [bool(each.any()) for each in derivatives] == [False, False]  # of a copy too
    assert min(steps_of(engine)) > 0


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_offloaded_optimizer_takes_the_same_steps(model_path, reference, zero_stage):
    engine = make_engine(model_path, zero_stage, offload_optimizer=True)
    assert steps_of(engine) == pytest.approx(reference[1], rel=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_checkpointed_activations_give_the_same_steps_with_a_second_forward(
    model_path, reference, zero_stage
):
    model = policy(model_path, activation_checkpointing=True)
    calls = []
    model.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine = make_engine(model_path, zero_stage, model=model)
    calls.clear()
    assert steps_of(engine) == pytest.approx(reference[1], rel=1e-4)
    assert len(calls) == 2 * STEPS * len(ROWS)
    assert not model.model.base_model.layers[0].mlp.training


def make_critic(model_path, zero_stage, seed=0, config=CONFIG):
    from learner.engine.deepspeed import DeepSpeedEngine, sharing

    with sharing(zero_stage):
        model = load_scalar_model(model_path, dtype="float32", attention="sdpa", seed=seed)
    settings = {"model_path": model_path, "zero_stage": zero_stage, "total_steps": STEPS}
    OPENED.append(DeepSpeedEngine(model, config, **settings))
    return OPENED[-1]


def steps_of(engine):
    """Take all steps; return the gradient norms."""
    norms = []
    for step in range(STEPS):
        for token_ids, position_ids in microbatches():
            engine.backward(loss_of(engine.forward(token_ids, position_ids)[0], step))
        norms.append(engine.step())
    return norms


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_critic_has_values_of_the_state_before_each_token_and_learns(model_path, zero_stage):
    row = torch.tensor([4, 7, 5, 9, 4, 7, 6]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    critic = make_critic(model_path, zero_stage)
    values = values_of(critic, *row)[0].detach()
    assert values[0] == values[4] == 0
    torch.testing.assert_close(values[1:3], values[5:7])  # the token itself is not seen yet
    losses = []
    for _ in range(STEPS):
        loss = (values_of(critic, *row)[0][1:4] - 1).square().sum()
        critic.backward(loss)
        critic.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_saved_critic_goes_on_the_same_and_is_a_model_of_transformers(
    model_path, tmp_path, zero_stage
):
    row = next(microbatches())
    critic = make_critic(model_path, zero_stage)

    def step(engine):
        engine.backward(values_of(engine, *row)[0].square().sum())
        engine.step()

    step(critic)
    write = critic.capture()
    step(critic)
    write(tmp_path)
    expected = values_of(critic, *row)[0].detach()
    other = make_critic(model_path, zero_stage, seed=9)
    other.load(tmp_path)
    step(other)
    assert torch.equal(values_of(other, *row)[0].detach(), expected)
    saved = load_scalar_model(str(tmp_path), dtype="float32", attention="sdpa", seed=1)
    assert saved.model.config.num_labels == 1
    assert len({load_scalar_model(model_path, dtype="float32", attention="sdpa", seed=seed)
                .model.score.weight.sum().item() for seed in (1, 1, 2)}) == 2  # fmt: skip


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_value_head_on_the_policy_has_a_rate_of_its_own_and_is_not_published(
    model_path, zero_stage
):
    rate = {"value_head": 10 * CONFIG.learning_rate}
    shared = policy(model_path)
    shared.add_value_head()
    engine = make_engine(model_path, zero_stage, model=shared, rates=rate)
    names = [name for name, _ in engine.weights()]
    assert names == [name for name, _ in policy(model_path).model.named_parameters()]
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    out = engine.forward(*next(microbatches()))
    assert out.values.abs().max() == 0
    engine.backward((out.values - 1).square().sum() + loss_of(out.logprobs, 0))
    engine.step()
    after = engine.forward(*next(microbatches())).values.detach()
    assert after[1:].abs().max() > 0
    assert {*engine.full_rates} == {CONFIG.learning_rate, 10 * CONFIG.learning_rate}
    moved = [name for name, tensor in engine.weights() if not torch.equal(tensor, before[name])]
    assert moved
