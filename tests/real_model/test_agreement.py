"""vLLM and the learner give each sampled token the same log-probability: pretrained and trained.

Prompts are written by the model's chat template; temperatures, stop strings and stop ids vary.
"""

import asyncio
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engines.model_folder import load_tokenizer
from actors.engines.protocol import SamplingParameters
from actors.environments.protocol import Message
from actors.rollout.chat_rendering import Renderer
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from queues.records import FinishReason
from tests.actors.fakes import engine_spec
from tests.real_model.conftest import MODEL, RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed]

COMMA, EOS = 28, 2
PROMPTS = {"float32": 12, "bfloat16": 3}
"""Prompts to sample from: many CPUs compute slowly in bfloat16."""
SETTINGS = [
    SamplingParameters(temperature=1.0, max_new_tokens=40),
    SamplingParameters(temperature=1.0, max_new_tokens=40, stop=(".", "the")),
    SamplingParameters(temperature=0.5, max_new_tokens=40, stop_ids=(COMMA,)),
    SamplingParameters(temperature=1.5, max_new_tokens=40, stop=("\n",), stop_ids=(COMMA,)),
]


def prompts(folder):
    """Return the ids of the prompts of the recipe, as rollouts have them."""
    renderer = Renderer(load_tokenizer(str(folder)))
    rows = map(json.loads, (RECIPE.parent / "chats.jsonl").read_text().splitlines())
    return [renderer.prompt([Message(**m) for m in row["messages"][:-1]]) for row in rows]


@cache
def sampled(folder, dtype):
    """Return each setting with its prompts and what vLLM sampled for them."""
    from actors.engines.vllm import VllmEngine

    async def generate():
        spec = engine_spec(folder, version=0, dtype=dtype, kv_cache_gib=1)
        engine = VllmEngine(spec, max_model_len=256)
        await engine.start()
        try:
            return [
                (settings, list(zip(asked, await asyncio.gather(*(
                    engine.generate(f"{number}", ids, replace(settings, seed=number))
                    for number, ids in enumerate(asked)
                )), strict=True)))
                for settings in SETTINGS
            ]  # fmt: skip
        finally:
            await engine.close()

    asked = prompts(folder)[: PROMPTS[dtype]]
    return asyncio.run(generate())


def trained_logprobs(folder, dtype, of):
    """Return the learner's log-probabilities of sampled tokens, packed into a row a setting."""
    policy = load_policy(str(folder), LogprobOptions(chunk=256), dtype=dtype, attention="sdpa")
    rows = []
    for settings, rollouts in of:
        policy.options = replace(policy.options, temperature=settings.temperature)
        ids = [torch.tensor([*prompt, *done.token_ids]) for prompt, done in rollouts]
        drawn = [torch.arange(len(prompt) + len(done.token_ids)) >= len(prompt)
                 for prompt, done in rollouts]  # fmt: skip
        with torch.no_grad():
            row = policy(torch.cat(ids), torch.cat([torch.arange(len(one)) for one in ids]))[0]
        rows.append(row[torch.cat(drawn)])
    return torch.cat(rows)


@pytest.fixture(params=["pretrained", "exported", "merged"])
def folder(request):
    """Provide the pretrained model, and what was exported from runs that trained it."""
    if request.param == "pretrained":
        return request.getfixturevalue("model")
    return request.getfixturevalue("trained" if request.param == "exported" else "adapted").export


def differences(folder, dtype):
    """Return |learner − vLLM| of sampled tokens, and what rounding makes of the learner's."""
    of = sampled(folder, dtype)
    own = trained_logprobs(folder, dtype, of)
    engine = torch.tensor([p for _, rollouts in of for _, done in rollouts for p in done.logprobs])
    exact = own if dtype == "float32" else trained_logprobs(folder, "float32", of)
    found, rounding = (own - engine).abs(), (own - exact).abs()
    print(f"{folder.name}, {dtype}, {len(own)} tokens: |learner − vLLM| {found.mean():.1e} on "
          f"average, {found.max():.1e} at most; rounding {rounding.mean():.1e}")  # fmt: skip
    return found, rounding


def test_in_float32_every_sampled_token_agrees_to_a_ten_thousandth(folder):
    found, _ = differences(folder, "float32")
    assert len(found) > 500
    assert found.max() <= 1e-4


def test_in_bfloat16_they_differ_by_no_more_than_rounding(model):
    """Both round, each in its own order, so twice as much is between them at most."""
    found, rounding = differences(model, "bfloat16")
    assert 0 < found.mean() <= 2 * rounding.mean()


def test_messages_end_with_the_turn_or_at_the_stops_that_were_asked_for(model):
    tokenizer = load_tokenizer(str(model))
    ended = set()
    for settings, rollouts in sampled(model, "float32"):
        for _, done in rollouts:
            text, last = tokenizer.decode(done.token_ids), done.token_ids[-1]
            before = tokenizer.decode(done.token_ids[:-1])
            assert not any(stop in before for stop in settings.stop)
            assert not {EOS, *settings.stop_ids} & {*done.token_ids[:-1]}
            by = [stop for stop in settings.stop if stop in text] or [
                stop for stop in (EOS, *settings.stop_ids) if stop == last
            ]
            assert bool(by) == (done.finish_reason is FinishReason.STOP)
            ended.update(by)
    assert {".", COMMA, EOS} <= ended


def test_the_folder_is_as_its_makers_published_it(model):
    """4 bits lose precision, and a GGUF file loses rules, which are written again."""
    tokenizer = load_tokenizer(str(model))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.tokenize(" 2026,  17") == ["Ġ", "2", "0", "2", "6", ",", "ĠĠ", "1", "7"]
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    config = json.loads((model / "config.json").read_text())
    generation = json.loads((model / "generation_config.json").read_text())
    for ids in (config, generation):
        assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, EOS, EOS)
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert "quantization_config" not in config
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    answer = loaded.generate(**question, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[question["input_ids"].shape[1] :])
