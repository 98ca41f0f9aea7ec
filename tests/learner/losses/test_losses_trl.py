"""Against TRL's own code: its loss and gradient, on equal inputs, where the definitions agree.

TRL's trainers are not built; the methods that compute a loss are called on an object that has what
they read. Where definitions differ, `learner/docs/differences.md` says so.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from learner.batch.token_weights import token_weights
from learner.corrections import importance_weights
from learner.losses import LossInputs, policy_loss
from learner.losses.kl import kl_loss

pytestmark = pytest.mark.slow  # TRL takes half a minute to import
pytest.importorskip("trl", reason="TRL is a dependency of tests only, and not installed")

LONGEST = 6
COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def trainers():
    """Return the two classes whose losses are compared."""
    from trl import DPOTrainer, GRPOTrainer

    return {"grpo": GRPOTrainer, "dpo": DPOTrainer}


@pytest.fixture
def batch():
    """Return padded [B, T] tensors in float64, some of them masked out."""
    make = torch.Generator().manual_seed(3)
    shape = (6, LONGEST)

    def noise(scale):
        return scale * torch.randn(shape, generator=make, dtype=torch.float64)

    current = -2 * torch.rand(shape, generator=make, dtype=torch.float64) - 0.1
    lengths = torch.tensor([6, 3, 1, 5, 4, 2])
    mask = torch.arange(LONGEST) < lengths[:, None]
    mask[3, 2] = False  # as a tool's answer
    return SimpleNamespace(
        current=current.requires_grad_(),
        old=current.detach() + noise(0.3),
        sampled=current.detach() + noise(0.5),
        reference=current.detach() + noise(0.5),
        advantages=torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.3], dtype=torch.float64),
        mask=mask,
    )


def packed(batch, *, proximal=None, behavior=None):
    """Return the valid tokens, packed; without a proximal policy the old one sampled them."""
    rows = torch.arange(len(batch.mask))[:, None].expand_as(batch.mask)
    inside = torch.arange(LONGEST) < torch.tensor([6, 3, 1, 5, 4, 2])[:, None]
    return LossInputs(
        logprobs=batch.current[inside],
        behavior_logprobs=(batch.old if behavior is None else behavior)[inside],
        advantages=batch.advantages[:, None].expand_as(batch.mask)[inside],
        mask=batch.mask[inside],
        sequence_ids=rows[inside],
        proximal_logprobs=None if proximal is None else proximal[inside],
        reference_logprobs=batch.reference[inside],
        group_ids=rows[inside] // 2,
    )


class Alone:
    """What TRL asks of accelerate, for one process."""

    num_processes = 1
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, values):
        return values.reshape(-1)

    gather_for_metrics = gather

    def reduce(self, values, reduction):
        return values


def grpo_loss(trainer, batch, *, weights=None, **settings):
    """TRL's loss, and its gradient in the log-probabilities [B, T]."""
    own = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    own |= {key: settings.pop(key) for key in list(settings) if key in own or "sapo" in key}
    stub = SimpleNamespace(
        **{
            "args": SimpleNamespace(**own),
            "loss_type": "grpo",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "max_completion_length": LONGEST,
            **settings,
        },
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch.current,
            torch.zeros_like(batch.current),
            None,
        ),
        accelerator=Alone(),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        get_off_policy_mask=trainer.get_off_policy_mask,
        model=SimpleNamespace(training=True),
        top_entropy_quantile=1.0,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(6, LONGEST, dtype=torch.int64),
        "completion_mask": batch.mask.double(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.sampled,
        "ref_per_token_logps": batch.reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer._compute_loss(stub, None, inputs)
    return loss, torch.autograd.grad(loss, batch.current)[0]


def our_loss(batch, inputs, per_token, aggregation):
    weights = token_weights(
        aggregation, inputs.mask, inputs.sequence_ids, inputs.group_ids, max_length=LONGEST
    )
    loss = (weights * per_token).sum()
    return loss, torch.autograd.grad(loss, batch.current)[0]


def agree(ours, theirs):
    """Token weights are float32; nothing else is."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("name", "options", "aggregation", "settings"),
    [
        ("grpo", {}, "sequence_mean", {"loss_type": "grpo"}),
        ("grpo", {}, "token_mean", {"loss_type": "bnpo"}),
        ("dapo", {}, "token_mean", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("grpo", {}, "fixed_length", {"loss_type": "dr_grpo"}),
        ("grpo", {"dual_clip": 1.4}, "sequence_mean", {"delta": 1.4}),
        ("cispo", {"cap_high": 1.3}, "token_mean", {"loss_type": "cispo", "epsilon_high": 1.3}),
        ("sapo", {}, "sequence_mean", {"loss_type": "sapo", **SAPO}),
        (
            "gspo",
            {"clip_low": 0.1, "clip_high": 0.15},
            "sequence_mean",
            {"epsilon_low": 0.1, "epsilon_high": 0.15, **SEQUENCE},
        ),
    ],
    ids=["grpo", "bnpo", "dapo", "dr_grpo", "delta", "cispo", "sapo", "gspo"],
)
def test_policy_losses_are_those_of_trl(trainers, batch, name, options, aggregation, settings):
    inputs = packed(batch)
    ours = our_loss(batch, inputs, policy_loss(name, inputs, **options).per_token, aggregation)
    agree(ours, grpo_loss(trainers["grpo"], batch, **settings))


@pytest.mark.parametrize(
    ("name", "options", "of_sequence"),
    [
        ("tis", {"cap": 1.3}, False),
        ("mis", {"low": 0.7, "high": 1.3}, False),
        ("sequence_tis", {"cap": 1.3}, True),
        ("sequence_mis", {"low": 0.2, "high": 1.3}, True),
    ],
)
def test_weights_are_those_of_trl_and_go_where_trl_puts_them(
    trainers, batch, name, options, of_sequence
):
    inputs = packed(batch, proximal=batch.old, behavior=batch.sampled)
    correction = importance_weights(name, inputs, **options)
    weighed = correction.weights * policy_loss("grpo", inputs).per_token
    difference = (batch.old - batch.sampled) * batch.mask
    ratio = (difference.sum(-1, keepdim=True) if of_sequence else difference).exp()
    if "cap" in options:
        ratio = ratio.clamp(max=options["cap"])
    else:
        ratio = ratio.masked_fill((ratio < options["low"]) | (ratio > options["high"]), 0.0)
    theirs = grpo_loss(trainers["grpo"], batch, weights=ratio)
    agree(our_loss(batch, inputs, weighed, "sequence_mean"), theirs)


def test_off_policy_sequence_masking_is_that_of_trl(trainers, batch):
    inputs = packed(batch, proximal=batch.old, behavior=batch.sampled)
    keep = importance_weights("opsm", inputs, threshold=0.05).keep
    assert 0 < int((inputs.mask & ~keep).sum()) < int(inputs.mask.sum())
    kept = torch.where(keep, policy_loss("grpo", inputs).per_token, 0.0)
    theirs = grpo_loss(trainers["grpo"], batch, off_policy_mask_threshold=0.05)
    agree(our_loss(batch, inputs, kept, "sequence_mean"), theirs)


@pytest.mark.parametrize(("form", "corrected"), [("k3", False), ("ratio_k3", True)])
def test_kl_terms_are_those_of_trl(trainers, batch, form, corrected):
    inputs = packed(batch)
    per_token = (
        policy_loss("grpo", inputs).per_token + COEFFICIENT * kl_loss(form, inputs).per_token
    )
    theirs = grpo_loss(trainers["grpo"], batch, beta=COEFFICIENT, use_bias_correction_kl=corrected)
    agree(our_loss(batch, inputs, per_token, "sequence_mean"), theirs)


def test_the_default_kl_term_has_the_gradient_of_trl_with_its_bias_correction(trainers, batch):
    inputs = packed(batch)
    term = COEFFICIENT * kl_loss("weighted_k2", inputs, cap=1e9).per_token
    ours = our_loss(batch, inputs, policy_loss("grpo", inputs).per_token + term, "sequence_mean")
    agree(
        ours,
        grpo_loss(trainers["grpo"], batch, beta=COEFFICIENT, use_bias_correction_kl=True),
    )


def dpo_loss(trainer, batch, kind):
    """TRL's loss of the pairs (row 0, 1), (2, 3), (4, 5), the even ones preferred."""
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    mask = torch.nn.functional.pad(batch.mask, (1, 0))
    masked = torch.where(batch.mask, batch.current, 0.0)
    reference = torch.where(batch.mask, batch.reference, 0.0).sum(1)
    zeros = torch.zeros(6, LONGEST, dtype=torch.float64)
    outputs = SimpleNamespace(
        log_probs=masked[order], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    stub = SimpleNamespace(
        accelerator=Alone(),
        aux_loss_enabled=False,
        beta=0.5,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        ld_alpha=None,
        loss_types=[kind],
        loss_weights=[1.0],
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(6, LONGEST + 1, dtype=torch.int64),
        "attention_mask": torch.ones(6, LONGEST + 1, dtype=torch.int64),
        "completion_mask": mask[order].long(),
        "ref_chosen_logps": reference[order][:3],
        "ref_rejected_logps": reference[order][3:],
    }
    loss = trainer._compute_loss(stub, lambda **_: outputs, inputs, False)
    return loss, torch.autograd.grad(loss, batch.current)[0]


@pytest.mark.parametrize("variant", ["sigmoid", "ipo"])
def test_dpo_is_that_of_trl(trainers, batch, variant):
    inputs = packed(batch)
    per_token = policy_loss("dpo", inputs, beta=0.5, variant=variant).per_token
    ours = our_loss(batch, inputs, per_token, "sequence_mean")
    agree(ours, dpo_loss(trainers["dpo"], batch, variant))
