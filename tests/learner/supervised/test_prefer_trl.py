"""Offline preferences against TRL's own code: its loss and gradient on the same texts.

Policy and reference are tables of bigrams. TRL's trainers are not built; the methods that compute a
loss are called on an object that has what they read.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from learner.config.supervised import PreferConfig
from learner.losses.preferences import dpo
from learner.supervised.prefer import Preference, train_preferences, unrelated_text
from learner.supervised.sft import Example
from tests.learner.bigram_engine import BigramEngine

pytestmark = pytest.mark.slow  # TRL takes half a minute to import
pytest.importorskip("trl", reason="TRL is a dependency of tests only, and not installed")

TOKENS, PAIRS = 9, 4
LENGTHS = ((2, 5), (1, 3), (4, 1), (3, 6), (2, 2), (5, 4), (1, 7), (3, 1))
"""Of prompt and completion, of better and worse texts in turn."""


@pytest.fixture(scope="module")
def trainers():
    from trl import DPOTrainer, KTOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    return SimpleNamespace(dpo=DPOTrainer, kto=KTOTrainer, orpo=ORPOTrainer, cpo=CPOTrainer)


@pytest.fixture(params=[0, 1])
def world(request):
    """Return the tables of policy and reference, and eight texts."""
    make = torch.Generator().manual_seed(request.param)

    def table():
        return torch.randn(TOKENS, TOKENS, generator=make, dtype=torch.float64)

    texts = []
    for prompt, reply in LENGTHS:
        ids = torch.randint(TOKENS, (prompt + reply,), generator=make).tolist()
        texts.append(Example(ids, [False] * prompt + [True] * reply))
    return SimpleNamespace(policy=table().requires_grad_(), reference=table(), texts=texts)


def unrelated(texts):
    """Return the prompt of each with the completion of the one before it, as TRL cycles them."""
    return [unrelated_text(text, texts[at - 1], 99) for at, text in enumerate(texts)]


def ours(world, preferences, **settings):
    """Return our loss and its gradient in the policy's table, added up over several rows."""
    config = PreferConfig(pairs="x", steps=1, microbatch_tokens=16, **settings)
    preferences = BigramEngine(world.reference.clone()).reference_of(preferences)
    engine = BigramEngine(world.policy.detach().clone())
    engine.step = lambda: 0.0
    [report] = train_preferences(engine, iter([preferences]), config)
    assert len(engine.rows) > 3
    return torch.tensor(report.loss, dtype=torch.float64), engine.table.grad


def columns(texts, prefix=""):
    """Return padded ids and masks, as TRL's collators make them."""
    longest = max(map(len, texts))
    pad = lambda values: [*values, *[0] * (longest - len(values))]  # noqa: E731
    return {
        f"{prefix}input_ids": torch.tensor([pad(text.token_ids) for text in texts]),
        f"{prefix}attention_mask": torch.tensor([pad([1] * len(text)) for text in texts]),
        f"{prefix}completion_mask": torch.tensor([pad(text.loss_mask) for text in texts]).long(),
    }


def model_of(table):
    """Return what TRL calls: its logits, and log-probabilities of the labels."""

    def model(input_ids, labels=None, **_):
        logits = table[input_ids]
        zeros = torch.zeros_like(logits[:, :-1, 0])
        log_probs = zeros
        if labels is not None:
            chosen = logits[:, :-1].log_softmax(-1)
            wanted = labels[:, 1:, None]
            log_probs = torch.where(wanted >= 0, chosen, 0.0).gather(-1, wanted.clamp(min=0))[
                ..., 0
            ]
        return SimpleNamespace(
            logits=logits,
            log_probs=log_probs,
            entropy=zeros.detach(),
            mean_logits=zeros.detach(),
            is_top1=zeros.bool(),
        )

    return model


def sums(table, texts):
    batch = columns(texts)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    return model_of(table)(batch["input_ids"], labels).log_probs.sum(-1)


def stub(**settings):
    from tests.learner.losses.test_losses_trl import Alone

    return SimpleNamespace(
        accelerator=Alone(),
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        is_encoder_decoder=False,
        **{"label_smoothing": 0.0, **settings},
    )


def dpo_of_trl(trainers, world, kind, beta):
    chosen, rejected = world.texts[0::2], world.texts[1::2]
    own = stub(
        beta=beta,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        loss_types=[kind],
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
    )
    inputs = columns([*chosen, *rejected]) | {
        "ref_chosen_logps": sums(world.reference, chosen),
        "ref_rejected_logps": sums(world.reference, rejected),
    }
    return trainers.dpo._compute_loss(own, model_of(world.policy), inputs, False)


def kto_of_trl(trainers, world, labels, options):
    own = stub(
        calculate_KL=True,
        loss_type="kto",
        precompute_ref_logps=True,
        **{"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **options},
    )
    own._compute_kl_logps = partial(trainers.kto._compute_kl_logps, own)
    others = unrelated(world.texts)
    inputs = (
        columns(world.texts)
        | columns(others, "KL_")
        | {
            "label": torch.tensor(labels),
            "ref_logps": sums(world.reference, world.texts),
            "ref_KL_logps": sums(world.reference, others),
        }
    )
    return trainers.kto._compute_loss(own, model_of(world.policy), inputs, False)


def concatenated_of_trl(trainer, world, **settings):
    """Return the loss of one of the trainers that need no reference."""
    own = stub(padding_value=0, pad_token_id=0, **settings)
    for method in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer, method):
            setattr(own, method, partial(getattr(trainer, method), own))
    for method in ("concatenated_inputs", "get_batch_logps"):
        setattr(own, method, getattr(trainer, method))
    batch = {}
    for side, texts in (("chosen", world.texts[0::2]), ("rejected", world.texts[1::2])):
        of_side = columns(texts)
        ids, said = of_side["input_ids"], of_side.pop("completion_mask")
        batch |= {f"{side}_{name}": column for name, column in of_side.items()}
        batch[f"{side}_labels"] = ids.masked_fill(said == 0, -100)
    return trainer.get_batch_loss_metrics(own, model_of(world.policy), batch)[0]


def agree(world, mine, loss):
    theirs = loss, torch.autograd.grad(loss, world.policy)[0]
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other.detach().to(own), rtol=1e-6, atol=1e-6)


def pairs(world):
    return [Preference((world.texts[i], world.texts[i + 1])) for i in range(0, 2 * PAIRS, 2)]


@pytest.mark.parametrize("beta", [0.05, 0.5, 2.0])
@pytest.mark.parametrize(("loss", "kind"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo_are_those_of_trl(trainers, world, loss, kind, beta):
    mine = ours(world, pairs(world), loss=loss, loss_options={"beta": beta})
    agree(world, mine, dpo_of_trl(trainers, world, kind, beta))


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ([True, False] * 4, {}),
        ([True, True, True, False] * 2, {"beta": 0.5}),
        ([True, False] * 4, {"beta": 2.0, "desirable_weight": 1.33, "undesirable_weight": 0.4}),
        ([False] * 7 + [True], {"desirable_weight": 3.0}),
        ([True] * 8, {"beta": 0.3}),
    ],
)
def test_kto_is_that_of_trl(trainers, world, labels, options):
    others = unrelated(world.texts)
    preferences = [
        Preference((text,), desirable=label, unrelated=Preference((other,)))
        for text, label, other in zip(world.texts, labels, others, strict=True)
    ]
    mine = ours(world, preferences, loss="kto", loss_options=options)
    agree(world, mine, kto_of_trl(trainers, world, labels, options))


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_orpo_is_that_of_trl(trainers, world, beta):
    mine = ours(world, pairs(world), loss="orpo", loss_options={"beta": beta})
    agree(world, mine, concatenated_of_trl(trainers.orpo, world, beta=beta))


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 2.0, "gamma": 1.0},
        {"beta": 0.1, "gamma": 0.5},
        {"beta": 10.0, "gamma": 3.0},
        {"beta": 2.5, "gamma": 0.0, "label_smoothing": 0.2},
    ],
)
def test_simpo_is_that_of_trl(trainers, world, options):
    mine = ours(world, pairs(world), loss="simpo", loss_options=options)
    settings = {"beta": options["beta"], "simpo_gamma": options["gamma"]}
    own = {"loss_type": "simpo", "cpo_alpha": 0, "alpha": 0.0, **settings}
    stubbed = partial(concatenated_of_trl, trainers.cpo, world, **own)
    agree(world, mine, stubbed(label_smoothing=options.get("label_smoothing", 0.0)))


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_label_smoothing_of_dpo_is_that_of_cpo_in_trl(trainers, smoothing):
    own = stub(beta=0.7, alpha=0.0, loss_type="sigmoid", label_smoothing=smoothing)
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64)
    theirs = trainers.cpo.cpo_loss(own, chosen, rejected)[0]
    torch.testing.assert_close(
        dpo(chosen, rejected, beta=0.7, label_smoothing=smoothing), theirs, rtol=1e-12, atol=0
    )
