"""Architectures of transformers: each is computed as by itself, or refused.

`python -m tests.learner.model.test_architectures` writes the table of them into the learner's page.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.errors import InputError
from learner.model.forward_check import check_forward
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from learner.model.rope import pin_rope
from tests.learner.model.architectures import ARCHITECTURES, WINDOW, configuration, write

PAGE = Path(__file__).parents[3] / "learner" / "docs" / "models.md"
MARKS = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
LENGTHS = [5, 3 * WINDOW, 3 * WINDOW + 1]
CONTEXT = 128
pytestmark = pytest.mark.usefixtures("one_thread")
REASONS = {
    "changes its logits": "its logits are not what they are taken for",
    "leaves out": '`attention = "sdpa"` leaves out its cap on scores',
    "see each other": "packed sequences would see each other",
    "tokens alone": "its log-probabilities are not those of one linear layer on its attention",
    "in a row": "packed sequences are computed otherwise than alone",
    "no base model": "its layers cannot be told from its head",
    "can be loaded": "transformers loads it otherwise",
    "": "it cannot be called with packed sequences",
}


def load(folder, attention="sdpa", **options):
    """Load a policy with the attention that transformers has for it."""
    options = {"dtype": "float32", "context": CONTEXT, **options}
    try:
        return load_policy(folder, LogprobOptions(chunk=64), attention=attention, **options)
    except InputError as error:
        if "does not support an attention" not in str(error):
            raise
        return load_policy(folder, LogprobOptions(chunk=64), attention="eager", **options)


def sequences():
    torch.manual_seed(1)
    return [torch.randint(3, 64, (length,)) for length in LENGTHS]


@torch.no_grad()
def expected(folder):
    """Log-probabilities of sequences by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    pin_rope(model, folder, CONTEXT)
    logprobs = []
    for ids in sequences():
        scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(scores.gather(-1, ids[1:, None])[:, 0])
    return logprobs


@torch.no_grad()
def largest_difference(policy, folder):
    """Return how far log-probabilities are from those of transformers, alone and in a row."""
    places = [torch.arange(length) for length in LENGTHS]
    alone = [policy(ids, place)[0] for ids, place in zip(sequences(), places, strict=True)]
    together = policy(torch.cat(sequences()), torch.cat(places))[0].split(LENGTHS)
    return max(
        float((computed[1:] - own).abs().max())
        for logprobs in (alone, together)
        for computed, own in zip(logprobs, expected(folder), strict=True)
    )


def outcome(name, folder):
    """Return the largest difference from the model's own forward pass, or why it is refused."""
    write(name, str(folder))
    try:
        policy = load(str(folder), attention="eager" if "attention eager" in name else "sdpa")
        check_forward(policy, policy, device=torch.device("cpu"))
    except InputError as error:
        return str(error)
    return largest_difference(policy, str(folder))


def table(outcomes):
    """Return the table of architectures, as the learner's page has it."""
    rows = []
    for name, result in outcomes.items():
        kind, _, special = name.partition(", ")
        verdict = "trained"
        if isinstance(result, str):
            verdict = "refused: " + next(text for part, text in REASONS.items() if part in result)
        rows.append(f"| `{kind}` | {special} | {verdict} |\n")
    return "| model type | with | |\n|---|---|---|\n" + "".join(rows)


def test_an_architecture_is_computed_as_by_itself_or_refused_as_the_table_of_the_page_says(
    tmp_path_factory,
):
    outcomes = {name: outcome(name, tmp_path_factory.mktemp("model")) for name in ARCHITECTURES}
    for name, result in outcomes.items():
        if isinstance(result, str):
            assert "\n" not in result, name
            assert len(result) < 500, name
        else:
            assert result < 1e-4, name
    assert sum(not isinstance(result, str) for result in outcomes.values()) >= 30
    page = PAGE.read_text()
    assert page.partition(MARKS[0])[2].partition(MARKS[1])[0] == table(outcomes)


def dropping(settings):
    """Return settings with every dropout at a half, those of a text model included."""
    return {
        name: dropping(value)
        if isinstance(value, dict)
        else 0.5
        if isinstance(value, float) and ("drop" in name or "pdrop" in name)
        else value
        for name, value in settings.items()
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_dropped_with_or_without_checkpoints_of_activations(name, tmp_path):
    config = configuration(name)
    write(name, str(tmp_path), type(config).from_dict(dropping(config.to_dict())))
    outputs, gradients = [], []
    ids, places = sequences()[1], torch.arange(LENGTHS[1])
    for checkpointing in (False, True):
        try:
            policy = load(str(tmp_path), activation_checkpointing=checkpointing)
            outputs += [policy(ids, places)[0] for _ in range(2)]
        except (InputError, TypeError):
            pytest.skip("it is not trained")
        again = []
        for layer in policy.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.register_forward_pre_hook(lambda layer, _: again.append(layer))  # noqa: B023
        outputs[-1].sum().backward()
        assert bool(again) == checkpointing
        gradients.append(policy.model.get_input_embeddings().weight.grad)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        found = {name: outcome(name, Path(temporary) / name) for name in ARCHITECTURES}
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}{table(found)}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    for name, result in found.items():
        print(f"{name:28} {result}")
