"""A run of Tunix itself: from the weights that transformers reads, to folders that it reads."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.loop import peer_run, tunix_worker
from deploy.config.loader import load_recipe
from deploy.storage.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,  # it compiles for half a minute
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("tunix", reason="Tunix is not installed: `make test-tunix`")

FILE = "model.safetensors"


def test_tunix_has_the_log_probabilities_of_transformers_and_returns_its_weights(tiny_model):
    import jax
    from flax import nnx
    from tunix.rl.common import compute_per_token_logps

    mesh = jax.sharding.Mesh([jax.devices()], ("fsdp", "tp"))
    model = tunix_worker.load(str(tiny_model), mesh)
    prompts, completions = torch.randint(3, 35, (4, 9)), torch.randint(3, 35, (4, 20))
    ours = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    with torch.no_grad():
        logits = ours(torch.cat([prompts, completions], dim=1)).logits[:, 8:-1]
    expected = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    result = compute_per_token_logps(
        *nnx.split(model), prompts.numpy(), completions.numpy(), pad_id=0, eos_id=1
    )
    assert abs(torch.tensor(result.tolist()) - expected).max() < 1e-4
    blank = AutoModelForCausalLM.from_config(ours.config)
    returned = tunix_worker.copy_weights(model, blank).state_dict()
    assert all(torch.equal(returned[name], value) for name, value in ours.state_dict().items())


def test_tunix_trains_every_batch_and_saves_weights_that_move(tiny_model, tmp_path, monkeypatch):
    async def ones(prompt, completion, answer, facts):
        return float(completion.count("1"))

    sizes = ["prompts.groups_per_batch=2", "prompts.group_size=4", "actors.max_new_tokens=12"]
    settings = [f"deploy.runs_dir={tmp_path}", "learner.checkpoint_every=2", "steps=3"]
    recipe = load_recipe("demo", [*settings, *sizes]).model_copy(update={"sft": None})
    recipe = recipe.updated(model={"path": str(tiny_model), "tiny": None})
    file = tmp_path / "recipe.json"
    file.write_text(recipe.model_dump_json())
    monkeypatch.setattr(peer_run, "last_answer", ones)
    monkeypatch.setattr(sys, "argv", ["tunix_worker", str(file)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    tunix_worker.main()
    run = RunDirectory(tmp_path / "demo")
    rows = run.rows("metrics.jsonl")
    assert [(row["version"], row["rollouts_trained"]) for row in rows] == [(0, 8), (1, 8), (2, 8)]
    assert all(8 <= row["tokens_trained"] <= 8 * 12 for row in rows)
    assert json.loads((run.path / "peer.json").read_text())["versions"]["google-tunix"]
    second, third = (load_file(folder / FILE) for folder in sorted(run.checkpoints.iterdir()))
    assert second.keys() == load_file(tiny_model / FILE).keys()
    assert not any(torch.equal(third[name], weights) for name, weights in second.items())
