"""Whole runs on a pretrained chat model: warm start, Ctrl-C, resumption, adapters, exports."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real_model.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed]

IDS = torch.arange(1000, 1032)[None]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS.to(model.device)).logits.float()


def difference(one, other):
    return float((logits(one) - logits(other)).abs().max())


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["trained", "adapted"])
def test_a_run_goes_on_after_ctrl_c_and_its_engine_computes_as_the_learner_does(name, request):
    done = request.getfixturevalue(name)
    summary, rows = done.run.summary, done.run.rows("metrics.jsonl")
    assert (summary["status"], summary["version"]) == ("done", done.steps)
    assert [row["version"] for row in rows] == list(range(done.steps))
    assert len({row["session_started_at"] for row in rows}) == done.sessions
    assert summary["rollouts_trained"] == done.steps * 2 * 4
    assert summary["accounting"]["balanced"]
    assert summary["weight_sync"]["failed"] == 0
    fresh = summary["mismatch"]["fresh"]
    print(f"{name}: {fresh}")
    assert fresh["tokens"] > 0
    assert fresh["mean_abs_logprob_difference"] < 1e-4


def test_rollouts_are_conversations_in_the_models_template_that_end_at_the_stops(trained, commands):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = commands.rollouts(trained.run.folder.name)
    assert rows
    for row in rows:
        prompt = tokenizer.decode(row["token_ids"][: row["prompt_length"]])
        reply = row["token_ids"][row["prompt_length"] :]
        assert prompt.startswith("<|im_start|>system\n")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        stopped = {2, 28} & {*reply} or "." in tokenizer.decode(reply)
        assert row["finish_reason"] == ("stop" if stopped else "length")


def test_what_was_trained_is_exported_for_transformers_with_all_that_the_folder_had(trained):
    exported, before = load(trained.export), load(trained.start)
    assert difference(exported, before) > 1e-3
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert json_or_text(trained.export / name) == json_or_text(MODEL / name), name
    of_export, own = map(AutoTokenizer.from_pretrained, (trained.export, MODEL))
    assert of_export.model_max_length == own.model_max_length


def json_or_text(file):
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_text()


def test_an_adapter_is_exported_alone_and_merged(adapted):
    import peft

    base, merged = load(adapted.start), load(adapted.export)
    assert difference(merged, base) > 1e-3
    attached = peft.PeftModel.from_pretrained(base, adapted.adapter)
    assert difference(merged, attached) < 1e-3
