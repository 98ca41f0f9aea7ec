"""A whole run that trains an adapter: vLLM merges its factors while DeepSpeed trains them."""

import pytest
import torch

from tests.deploy.conftest import FinishedRun

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(headway):
    """Provide a run of six batches, of which the last two were trained after it was resumed."""
    headway.finish(
        "adapted", "steps=4", "actors.engine=vllm", "learner.lora.rank=4",
        "learner.learning_rate=1e-2", "learner.kl.coefficient=0.05",
        'actors.reward=["varied:score"]', "heldout.every=4",
    )  # fmt: skip
    resumed = headway("resume", "adapted", "--set", "steps=6")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    return FinishedRun(headway.run_folder("adapted"), resumed.stdout)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits


def test_the_engine_and_the_learner_agree_and_only_factors_travel(run):
    summary, swaps = run.summary, run.rows("swaps.jsonl")
    assert (summary["status"], summary["version"]) == ("done", 6)
    assert summary["weight_sync"]["failed"] == 0
    fresh = summary["mismatch"]["fresh"]
    assert fresh["tokens"] > 0
    assert fresh["mean_abs_logprob_difference"] < 1e-4
    rows = run.rows("metrics.jsonl")
    assert rows[-1]["reference_kl"] > 0
    model = run.folder.parent / "small-sft" / "model"
    whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert max(swap["bytes"] for swap in swaps) < 0.5 * whole


def test_its_checkpoints_are_adapters_that_peft_loads_and_its_export_is_the_merged_model(
    headway, run
):
    import peft
    from transformers import AutoModelForCausalLM

    for options in (("--to", "merged"), ("--to", "adapter", "--adapter")):
        exported = headway.call("export", "adapted", *options)
        assert exported.returncode == 0, exported.stderr
    base = AutoModelForCausalLM.from_pretrained(headway.folder / "runs/small-sft/model")
    plain = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, headway.folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(headway.folder / "merged")
    assert not torch.allclose(logits(adapted), plain, atol=1e-3)
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=0)
    for folder in ("merged", "adapter"):
        assert (headway.folder / folder / "tokenizer.json").exists()
        assert not (headway.folder / folder / "optimizer").exists()


def test_a_run_of_whole_weights_has_no_adapter_to_export(headway, finished):
    refused = headway.call("export", "small", "--to", "none", "--adapter")
    assert refused.returncode == 2
    assert "trained whole weights: export it without --adapter" in refused.stderr
    assert not (headway.folder / "none").exists()
