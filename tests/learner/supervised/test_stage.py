"""A warm start is the same on any number of ranks, at any ZeRO stage, and from a checkpoint."""

import pytest
import torch
from rank_processes import STAGES, spawn
from stage_processes import SAVED, STEPS, examples, heldout, trained
from transformers import AutoModelForCausalLM

from learner.supervised.sft import batches_of

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of the stages, each named RANKS-ZERO."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({1: (0,), 2: (3,)}, id="some"),
        pytest.param({1: STAGES, 2: STAGES}, id="all", marks=pytest.mark.slow),
    ],
)
def measured(request, model_path, folder):
    """Return what `trained` does, by number of ranks and ZeRO stage."""
    return {
        (ranks, stage): result
        for ranks, stages in request.param.items()
        for stage, result in spawn(ranks, trained, model_path, str(folder), stages).items()
    }


def plain_loss(model, batch):
    """Return the mean loss of a batch by transformers alone, one example after the other."""
    total, count = 0.0, 0
    for example in batch:
        ids, learned = torch.tensor([example.token_ids]), torch.tensor(example.loss_mask[1:])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        total -= logprobs.gather(1, ids[0, 1:, None])[:, 0][learned].sum()
        count += int(learned.sum())
    return total / count


def test_the_first_loss_and_gradient_are_those_of_plain_torch(measured, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    loss = plain_loss(model, next(batches_of(examples(), 60)))
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    straight, _ = measured[1, 0]
    assert straight["losses"][0][1] == pytest.approx(loss.item(), rel=1e-6)
    assert (straight["gradient"] - gradient).norm() < 1e-6 * gradient.norm()


def test_losses_and_gradient_do_not_depend_on_ranks_and_zero_stage(measured):
    expected, _ = measured[1, 0]
    for layout, (found, _) in measured.items():
        difference = (found["gradient"] - expected["gradient"]).norm()
        assert difference < 1e-6 * expected["gradient"].norm(), layout
        for one, other in zip(found["losses"], expected["losses"], strict=True):
            assert one == pytest.approx(other, rel=1e-6, nan_ok=True), layout
        assert [row[0] for row in found["losses"]] == [*range(1, STEPS + 1)]


def test_a_stage_goes_on_from_its_checkpoint_as_if_it_had_not_been_interrupted(measured):
    for layout, (straight, again) in measured.items():
        expected = [row[:2] for row in straight["losses"][SAVED:]]
        assert [row[:2] for row in again["losses"]] == expected, layout
        assert straight["weights"].keys() == again["weights"].keys()
        for name, weight in straight["weights"].items():
            assert torch.equal(weight, again["weights"][name]), (layout, name)


def test_the_heldout_loss_is_that_of_the_written_model_and_is_measured_when_due(measured, folder):
    losses = measured[2, 3][0]["losses"]
    assert [row[2] for row in losses] == [0, 2, 2, 4]
    model = AutoModelForCausalLM.from_pretrained(folder / "2-3" / "model", dtype=torch.float64)
    assert losses[-1][3] == pytest.approx(plain_loss(model, heldout()).item(), rel=1e-6)
