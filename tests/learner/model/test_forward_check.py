"""The check of a loaded model: dependence between sequences, positions, critics, references."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
)

from headway.errors import InputError
from learner.engine.reference import Reference
from learner.model import forward_check
from learner.model.forward_check import check_forward
from learner.model.logprobs import LogprobOptions
from learner.model.policy import Policy, load_policy
from learner.model.scalar_model import load_scalar_model
from learner.model.ways import Way
from tests.learner.model.architectures import (
    BASE,
    HEAD,
    LATENT,
    LONGROPE,
    SOME,
    configuration,
    rope,
    write,
)

CPU = torch.device("cpu")
OPTIONS = LogprobOptions(chunk=64)


def make(config=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**BASE), dtype=dtype).eval()
    return Policy(model, OPTIONS)


@pytest.fixture
def always_packed(monkeypatch):
    """Leave models as they are: packed, whether or not that is exact."""
    monkeypatch.setattr(forward_check, "choose_way", lambda module: None)


def saved(folder, config):
    write("llama", str(folder), config)
    return str(folder)


def load(path, **options):
    return load_policy(path, OPTIONS, dtype="float32", attention="sdpa", **options)


# --- dependence between the sequences of a row


def leaking(policy, size):
    """Return the policy with sequences that see the embeddings of the first."""

    def run(token_ids, position_ids):
        logprobs, *others = policy(token_ids, position_ids)
        lead = policy.model.get_input_embeddings()(token_ids)[0].float().sum()
        later = (position_ids == 0).cumsum(0) > 1
        return logprobs + size * torch.tanh(lead) * later, *others

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_without_a_leak_do_not_move_at_all(dtype):
    policy = make(dtype=dtype)
    check_forward(policy, policy, device=CPU)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 0.14), (torch.bfloat16, 1e-5), (torch.float32, 3e-6)],
    ids=str,
)
def test_a_leak_is_refused_however_small_it_is_beside_rounding(dtype, size):
    policy = make(dtype=dtype)
    with pytest.raises(InputError, match="packed together see each other"):
        check_forward(policy, leaking(policy, size), device=CPU)


@pytest.mark.parametrize(("size", "refused"), [(1e-6, False), (1e-4, True)])
def test_rounding_that_follows_the_first_sequence_is_no_leak_but_a_discrete_choice_is(
    size, refused
):
    policy = make()

    def run(token_ids, position_ids):
        """As kernels whose shapes follow the routing of experts."""
        logprobs, *others = policy(token_ids, position_ids)
        later = (position_ids == 0).cumsum(0) > 1
        return logprobs + size * (token_ids[0] % 7) * later, *others

    if refused:
        with pytest.raises(InputError, match="see each other"):
            check_forward(policy, run, device=CPU)
    else:
        check_forward(policy, run, device=CPU)


@pytest.mark.usefixtures("always_packed")
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_state_that_is_carried_on_is_refused_in_bfloat16_too(spread):
    """Of small weights, it does not move log-probabilities by as much as bfloat16 shows."""
    config = configuration("lfm2")
    config.initializer_range = spread
    policy = make(config, torch.bfloat16)
    with pytest.raises(InputError, match="see each other"):
        check_forward(policy, policy, device=CPU)


# --- what is not the model's own


def without_window(policy):
    """Return the policy with layers that see everything before a token."""
    config = policy.model.config
    window = config.sliding_window

    def run(token_ids, position_ids):
        config.sliding_window = 10**6
        try:
            return policy(token_ids, position_ids)
        finally:
            config.sliding_window = window

    return run


@pytest.mark.parametrize("window", [8, 500])
def test_a_window_that_is_left_out_is_refused_with_the_difference(window, caplog):
    policy = make(
        MistralConfig(**{**BASE, "sliding_window": window, "max_position_embeddings": 2048})
    )
    with caplog.at_level("INFO"):
        check_forward(policy, policy, device=CPU)
    assert f"settings of its reach: {{'sliding_window': {window}}}" in caplog.text
    with pytest.raises(
        InputError, match=rf"differ by up to \d.*of {window + 32 if window > 64 else 128}"
    ):
        check_forward(policy, without_window(policy), device=CPU)


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_is_left_out_shows_in_bfloat16_too_however_small_the_weights(dtype, spread):
    policy = make(
        MistralConfig(**{**BASE, "sliding_window": 8, "initializer_range": spread}), dtype
    )
    check_forward(policy, policy, device=CPU)
    with pytest.raises(InputError, match="differ by up to"):
        check_forward(policy, without_window(policy), device=CPU)


FORMS = ["gemma2", "cohere", "granite, scaled logits", "gemma4, capped logits"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1e-3, 0.3])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_logits_that_is_left_out_is_refused_however_small_they_are(name, spread, dtype):
    config = configuration(name)
    config.get_text_config().initializer_range = spread
    policy = make(config, dtype)
    policy.model.set_attn_implementation("eager")
    check_forward(policy, policy, device=CPU)
    policy.options = OPTIONS
    with pytest.raises(InputError, match="changes its logits after the output embedding"):
        check_forward(policy, policy, device=CPU)


def test_a_form_of_logits_that_the_model_does_not_have_is_refused():
    policy = make()
    policy.options = replace(OPTIONS, cap=30.0)
    with pytest.raises(InputError, match="changes its logits after the output embedding"):
        check_forward(policy, policy, device=CPU)


@pytest.mark.usefixtures("always_packed")
def test_sparse_attention_is_compared_on_more_tokens_than_it_chooses(tmp_path):
    """Its choice among packed tokens is right as long as it takes all of them."""
    sparse = {"index_topk": 200, "index_n_heads": 2, "index_head_dim": 16}
    settings = {**BASE, **LATENT, **sparse, "max_position_embeddings": 256}
    policy = load(saved(tmp_path, CONFIG_MAPPING["deepseek_v32"](**settings)))
    with pytest.raises(InputError, match=r"differ by up to .* row of 239 tokens"):
        check_forward(policy, policy, device=CPU)


def test_a_cap_on_scores_that_a_kernel_leaves_out_is_refused():
    policy = make(configuration("gemma2"))
    with pytest.raises(InputError, match=r"attention = 'sdpa' leaves out .* = .eager"):
        check_forward(policy, policy, device=CPU)
    policy.model.set_attn_implementation("eager")
    check_forward(policy, policy, device=CPU)


# --- rope that depends on a row


def logprobs(policy, length, *others):
    """Log-probabilities of a sequence, alone or before others in its row."""
    ids = [torch.arange(3, 3 + size) % 60 for size in (length, *others)]
    places = torch.cat([torch.arange(size) for size in (length, *others)])
    return policy(torch.cat(ids), places)[0][1:length]


@pytest.mark.parametrize(("context", "long"), [(16, False), (17, True), (64, True)])
def test_longrope_takes_the_factors_of_the_engine_for_every_sequence(tmp_path, context, long):
    path = saved(tmp_path, LlamaConfig(**{**BASE, **LONGROPE}))
    pinned = load(path, context=context)
    plain = Policy(AutoModelForCausalLM.from_pretrained(path), OPTIONS)
    kind = "long_factor" if long else "short_factor"
    factors = LONGROPE["rope_parameters"][kind]
    both = {**LONGROPE["rope_parameters"], "short_factor": factors, "long_factor": factors}
    fixed = make(LlamaConfig(**{**BASE, "rope_parameters": both}))
    for sizes in ((10,), (10, 40)):
        torch.testing.assert_close(logprobs(pinned, *sizes), logprobs(fixed, *sizes))
    assert not torch.allclose(logprobs(plain, 10), logprobs(plain, 10, 40), atol=0.1)
    check_forward(pinned, pinned, device=CPU)


def test_longrope_without_an_engine_is_computed_one_sequence_after_another(tmp_path):
    path = saved(tmp_path, LlamaConfig(**{**BASE, **LONGROPE}))
    policy, scores = load(path), load_scalar_model(path, dtype="float32", attention="sdpa", seed=0)
    for module in (policy, scores):
        check_forward(module, module, device=CPU)
        assert module.way is Way.ALONE


def test_dynamic_rope_is_refused_beyond_the_positions_of_the_model(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    path = saved(tmp_path, LlamaConfig(**{**BASE, "rope_parameters": dynamic}))
    policy = load(path, context=128)
    check_forward(policy, policy, device=CPU)
    with pytest.raises(InputError, match=r"129 tokens, which must be at most .* 128"):
        load(path, context=129)


def by_layers(kind):
    """Return the settings of a model whose full attention has another rope than its windows."""
    default = {"rope_type": "default", "rope_theta": 1e4}
    layers = {"sliding_attention": default, "full_attention": kind["rope_parameters"]}
    return Gemma3TextConfig(**{**BASE, **HEAD, **SOME, "rope_parameters": layers})


def test_the_rope_of_one_type_of_layers_is_held_to_the_same_rules(tmp_path):
    path = saved(tmp_path, by_layers(rope("dynamic", factor=4.0)))
    load(path, context=128)
    with pytest.raises(InputError, match=r"129 tokens, which must be at most .* 128"):
        load(path, context=129)
    policy = load(saved(tmp_path, by_layers(LONGROPE)), context=17)
    check_forward(policy, policy, device=CPU)
    assert policy.model.model.rotary_emb.full_attention_inv_freq.tolist() == pytest.approx(
        [1 / (factor * 10**power) for power, factor in enumerate((2, 3, 4, 5))]
    )


@pytest.mark.parametrize("setting", [{"factor": 2.0}, {"attention_factor": 2.0}])
def test_longrope_that_vllm_would_scale_otherwise_is_refused(tmp_path, setting):
    longrope = {"rope_parameters": {**LONGROPE["rope_parameters"], **setting}}
    with pytest.raises(InputError, match=r"scaled by .* and vLLM scales it by 1\.32288"):
        load(saved(tmp_path, LlamaConfig(**{**BASE, **longrope})), context=64)


# --- critics, reward models and references


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3_moe", "gpt2"])
def test_scores_are_those_of_the_model_itself(tmp_path, name, dtype):
    write(name, str(tmp_path))
    scores = load_scalar_model(str(tmp_path), dtype=dtype, attention="sdpa", seed=0)
    check_forward(scores, scores, device=CPU)


@pytest.mark.usefixtures("always_packed")
def test_scores_that_depend_on_other_texts_are_refused(tmp_path):
    write("jamba", str(tmp_path))
    scores = load_scalar_model(str(tmp_path), dtype="float32", attention="sdpa", seed=0)
    with pytest.raises(InputError, match=r"see each other.*: scores of the second"):
        check_forward(scores, scores, device=CPU)


def test_a_reference_is_checked_when_it_is_made():
    policy = make(configuration("cohere"))
    policy.options = OPTIONS
    with pytest.raises(InputError, match="changes its logits"):
        Reference(policy, device=CPU, origin="")
