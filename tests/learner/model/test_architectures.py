"""Architectures of transformers: each is computed as by itself, or refused.

`python -m tests.learner.model.test_architectures` writes the table of them into the learner's page.
"""

import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.errors import InputError
from learner.model.forward_check import check_forward, foretold_way
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import plain_name
from learner.model.policy import load_policy
from learner.model.rope import pin_rope
from learner.model.ways import Way
from tests.learner.model.architectures import ARCHITECTURES, WINDOW, configuration, write

PAGE = Path(__file__).parents[3] / "learner" / "docs" / "models.md"
MARKS = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
LENGTHS = [5, 3 * WINDOW, 3 * WINDOW + 1]
CONTEXT = 128
pytestmark = pytest.mark.usefixtures("one_thread")
COLUMNS = "| computed, attention | model types |\n|---|---|\n"
FEW = (
    "llama", "llama, rope longrope", "gemma2", "gpt_oss, some windows", "gptj", "opt", "lfm2",
    "qwen3_next", "deepseek_v32, chosen tokens", "bert",
)  # fmt: skip
"""Architectures of each kind and way; all others are slow tests."""
EACH = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in ARCHITECTURES]
LOADED = "needs an `AutoModelForCausalLM` in transformers; its language model alone trains"
NEEDED = {
    "xglm": "trains in float32; in bfloat16 it is further from its own pass than roundings are",
    "mistral3, window": LOADED,
    "llava": LOADED,
}
"""What refused architectures would need."""
SHORT = {Way.PACKED: "packed", Way.BESIDE: "beside each other", Way.ALONE: "one after another"}


def load(folder, dtype="float32", **options):
    options = {"context": CONTEXT, "attention": "auto", **options}
    return load_policy(folder, LogprobOptions(chunk=64), dtype=dtype, **options)


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


def checked(folder, dtype):
    policy = load(folder, dtype)
    check_forward(policy, policy, device=torch.device("cpu"))
    return policy


def outcome(name, folder):
    """Return the first cell of a model's row, and its difference from its own pass, 0 if refused.

    It is computed alike in float32 and bfloat16.
    """
    write(name, folder)
    try:
        policy, half = (checked(folder, dtype) for dtype in ("float32", "bfloat16"))
    except InputError as error:
        reason = NEEDED.get(name, str(error).partition("cannot be trained here: ")[2])
        return f"refused: {reason}", 0.0
    attention = plain_name(policy.model.config._attn_implementation)
    assert (half.way, half.of_head) == (policy.way, policy.of_head)
    assert foretold_way(folder, "auto", CONTEXT).startswith(f"{policy.way.value}, with attention")
    return f"{SHORT[policy.way]}, {attention}", largest_difference(policy, folder)


def rows_of_page():
    """Return the rows of the table: the model types by their first cells."""
    table = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0].removeprefix(COLUMNS)
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {first: models.split(", ") for first, models in cells}


def title(name):
    """Return an architecture as the table names it."""
    kind, _, special = name.partition(", ")
    return f"`{kind}` ({special})" if special else f"`{kind}`"


@pytest.mark.parametrize("name", EACH)
def test_an_architecture_is_computed_as_by_itself_or_refused_as_its_row_of_the_page_says(
    name, tmp_path
):
    row, difference = outcome(name, str(tmp_path))
    assert title(name) in rows_of_page()[row]
    assert difference < 1e-4


def test_the_page_has_a_row_for_each_architecture_of_which_five_at_most_are_refused():
    rows = rows_of_page()
    listed = [model for models in rows.values() for model in models]
    assert sorted(listed) == sorted(map(title, ARCHITECTURES))
    assert len(ARCHITECTURES) >= 90
    assert sum(len(models) for row, models in rows.items() if row.startswith("refused")) <= 5


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


@pytest.mark.parametrize("name", EACH)
def test_nothing_is_dropped_with_or_without_checkpoints_of_activations(name, tmp_path):
    config = configuration(name)
    write(name, str(tmp_path), type(config).from_dict(dropping(config.to_dict())))
    outputs, gradients = [], []
    ids, places = sequences()[1], torch.arange(LENGTHS[1])
    for checkpointing in (False, True):
        try:
            policy = load(str(tmp_path), activation_checkpointing=checkpointing)
            check_forward(policy, policy, device=torch.device("cpu"))
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
    rows = defaultdict(list)
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as temporary:
            first, found = outcome(architecture, temporary)
        print(f"{found:8.1e} {first}: {title(architecture)}", flush=True)
        rows[first].append(title(architecture))
    ordered = sorted(rows, key=lambda row: (row.startswith("refused"), row))
    table = COLUMNS + "".join(f"| {row} | {', '.join(rows[row])} |\n" for row in ordered)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
