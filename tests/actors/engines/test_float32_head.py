"""bfloat16 models with logits in float32 on both sides."""

import asyncio

import pytest
import torch
from fakes import engine_spec
from transformers import AutoModelForCausalLM

from actors.engines.protocol import SamplingParameters
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [5, 9, 4, 7]


@pytest.fixture(scope="module")
def narrow_model(tiny_model, tmp_path_factory):
    """Write the tiny model in bfloat16."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.ndim == 2 else 1
    model.save_pretrained(folder)
    return str(folder)


def sampled(model_path, *, float32_head):
    """Ids and log-probabilities of one rollout of an engine."""
    from actors.engines.vllm import VllmEngine

    async def generate():
        engine = VllmEngine(
            engine_spec(
                model_path, version=0, dtype="bfloat16", float32_head=float32_head, cores=("0",),
                kv_cache_gib=1,
            ),
            max_model_len=128,
        )  # fmt: skip
        await engine.start()
        try:
            sampling = SamplingParameters(temperature=1.0, max_new_tokens=100)
            return await engine.generate("one", PROMPT, sampling)
        finally:
            await engine.close()

    done = asyncio.run(generate())
    return [*PROMPT, *done.token_ids], torch.tensor(done.logprobs)


@pytest.mark.parametrize("float32_head", [False, True])
def test_engine_and_learner_form_logits_alike(narrow_model, float32_head):
    ids, logprobs = sampled(narrow_model, float32_head=float32_head)
    policy = load_policy(
        narrow_model,
        LogprobOptions(chunk=64, float32_head=float32_head),
        dtype="bfloat16",
        attention="sdpa",
    )
    with torch.no_grad():
        own = policy(torch.tensor(ids), torch.arange(len(ids)))[0][len(PROMPT) :]
    difference = (own - logprobs).abs().mean().item()
    print(f"float32_head = {float32_head}: mean difference {difference:.2e} nats")
    assert difference < 0.02
