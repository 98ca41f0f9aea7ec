"""Everything in vLLM that can change a token's probability: mirrored, neutral or refused.

The tables name each field, argument and model of the installed vLLM, so that a new one fails here
until somebody has looked at it.
"""

import asyncio
import dataclasses
import importlib
import json
import re
import types
from pathlib import Path

import pytest
import torch
from fakes import engine_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.config import ActorsConfig
from actors.engines import sampling_rules
from actors.engines.protocol import SamplingParameters
from actors.engines.sampling_rules import LOGITS_PROCESSORS, check_sampling
from actors.engines.vllm_arguments import plain_arguments
from headway.errors import InputError
from learner.model.logprobs import LogprobOptions, chunked_logprobs

MIRRORED = {"temperature", "top_p", "top_k"}
"""The learner divides by the temperature; top-p and top-k are refused by the objectives that would
need them mirrored."""
NEUTRAL = {
    # which tokens are drawn from the same probabilities, and how they come back
    "n", "seed", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
    # where a rollout ends; the tokens before have their own probabilities
    "stop", "stop_token_ids", "max_tokens", "_eos_token_id", "_all_stop_token_ids",
}  # fmt: skip
REFUSED = {
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.1,
    "ignore_eos": True, "min_tokens": 1, "structured_outputs": {"regex": "a"},
    "logit_bias": {"5": 1.0}, "allowed_token_ids": [5], "extra_args": {"a": 1}, "bad_words": ["a"],
    "thinking_token_budget": 5, "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    "trace_decode_token_ids": [5], "watermarking": True,
    "_bad_words_token_ids": [[5]], "_watermarking_skipped": True,
}  # fmt: skip
"""Fields that change probabilities, or end rollouts by what they say, each with such a value."""


@pytest.fixture(scope="module")
def vllm():
    return pytest.importorskip("vllm")


@pytest.mark.vllm
def test_every_field_of_a_request_is_mirrored_neutral_or_refused(vllm):
    fields = set(vllm.SamplingParams.__struct_fields__)
    known = [*MIRRORED, *NEUTRAL, *REFUSED]
    assert sorted(known) == sorted(fields), "a new vLLM: what do its new fields change?"


@pytest.mark.parametrize("field", REFUSED)
def test_no_recipe_can_name_what_would_change_probabilities(field):
    with pytest.raises(ValidationError, match=f"{field}\n  Extra inputs are not permitted"):
        ActorsConfig(**{field: REFUSED[field]})
    assert field not in {f.name for f in dataclasses.fields(SamplingParameters)}


class RecordingLlm:
    """vLLM's `AsyncLLM` without a model: it keeps the parameters of its requests."""

    errored = False

    def __init__(self):
        self.requests = []

    async def update_weight_version(self, version):
        pass

    async def init_weight_transfer_engine(self, request):
        pass

    async def generate(self, prompt, params, request_id):
        self.requests.append(params)
        span = types.SimpleNamespace(version="0", start=0, end=1)
        done = types.SimpleNamespace(
            token_ids=[1],
            logprobs=types.SimpleNamespace(logprobs=[-1.0], start_indices=[0]),
            weight_versions=[span], finish_reason="stop",
        )  # fmt: skip
        yield types.SimpleNamespace(outputs=[done], finished=True)

    def shutdown(self, timeout):
        pass


@pytest.fixture
def requested(vllm, monkeypatch, tiny_model):
    """Return a function that returns the parameters that vLLM gets for ours."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from actors.engines.vllm import VllmEngine

    model = RecordingLlm()
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: model)

    def ask(sampling):
        async def play():
            engine = VllmEngine(spec(str(tiny_model)), max_model_len=64)
            await engine.start()
            await engine.generate("one", [5, 6], sampling)
            await engine.close()

        asyncio.run(play())
        return model.requests[-1]

    return ask


def spec(model_path, **settings):
    return engine_spec(model_path, version=0, kv_cache_gib=1, **settings)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=1.0, max_new_tokens=8),
        SamplingParameters(temperature=0.01, max_new_tokens=8),
        SamplingParameters(temperature=2.0, max_new_tokens=8, top_p=0.9, top_k=5, seed=3),
        SamplingParameters(temperature=0.0, max_new_tokens=8),
    ],
    ids=lambda sampling: f"temperature {sampling.temperature}",
)
def test_a_request_has_what_was_asked_for_and_nothing_that_changes_probabilities(
    vllm, requested, sampling
):
    params, plain = requested(sampling), vllm.SamplingParams()
    for field in REFUSED:
        assert getattr(params, field) == getattr(plain, field), field
    assert not plain.bad_words
    for field in MIRRORED:
        assert getattr(params, field) in (getattr(sampling, field), {-1: 0}.get(sampling.top_k))


@pytest.mark.vllm
def test_a_recipe_takes_just_the_temperatures_that_vllm_takes_unchanged(vllm):
    def unchanged(temperature):
        try:
            return vllm.SamplingParams(temperature=temperature).temperature == temperature
        except vllm.exceptions.VLLMValidationError:
            return False

    def taken(temperature):
        try:
            return bool(ActorsConfig(temperature=temperature))
        except ValidationError:
            return False

    for temperature in (0.001, 0.0099, 0.01, 0.0101, 0.7, 1.0, 1.99, 2.0, 2.01, 10.0):
        assert taken(temperature) == unchanged(temperature), temperature


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4)


@pytest.mark.vllm
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(LOGITS, min_size=1, max_size=3), temperature=st.floats(0.01, 2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_learner_mirrors_what_vllm_makes_of_logits(vllm, dtype, rows, temperature):
    """VLLM's own sampler runs on made-up logits; the learner forms the same ones."""
    from vllm.v1.sample.logits_processor.state import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    logits, count = torch.tensor(rows).to(dtype), len(rows)
    none = torch.zeros(count)
    metadata = SamplingMetadata(
        temperature=torch.full((count,), temperature), all_greedy=False, all_random=True,
        top_p=None, top_k=None, generators={}, max_num_logprobs=0, no_penalties=True,
        prompt_token_ids=None, frequency_penalties=none, presence_penalties=none,
        repetition_penalties=none, output_token_ids=[[] for _ in rows],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    done = Sampler(logprobs_mode="processed_logprobs")(logits.clone(), metadata)
    sampled, logprobs = done.sampled_token_ids[:, 0].long(), done.logprobs_tensors.logprobs[:, 0]
    options = LogprobOptions(chunk=2, temperature=temperature)
    own, _ = chunked_logprobs(logits, torch.eye(4, dtype=dtype), sampled, options)
    torch.testing.assert_close(own, logprobs, atol=1e-4, rtol=1e-5)


CHANGE_PROBABILITIES = {
    "logits_processors", "speculative_config", "spec_method", "spec_model", "spec_tokens",
    "watermark_config", "override_generation_config", "reasoning_config", "reasoning_parser",
    "reasoning_parser_plugin", "structured_outputs_config", "diffusion_config",
    "return_sampling_mask", "enable_trace_replay",
}  # fmt: skip
"""Arguments of an engine that could; ours leaves them as they are by default."""
DO_NOT = {
    "logprobs_mode", "generation_config", "use_fp64_gumbel", "max_logprobs", "tokenizer",
    "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "hf_token", "tokens_only",
    "enable_batch_sharded_sampling", "per_request_spec_decode_metrics", "watermark",
    "max_num_batched_tokens", "max_num_queued_tokens", "max_num_scheduled_tokens",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "kv_cache_metrics_sample",
    "mm_processor_device", "logging_config", "log_level", "log_config_file",
}  # fmt: skip


@pytest.mark.vllm
def test_no_argument_of_an_engine_changes_probabilities(vllm, tiny_model):
    arguments = plain_arguments(spec(str(tiny_model)), 64)
    assert arguments["logprobs_mode"] == "processed_logprobs"
    fields = {field.name: field for field in dataclasses.fields(vllm.EngineArgs)}
    about = re.compile("logit|sampl|spec_|specul|generation|watermark|reason|struct|diffus|token")
    new = {name for name in fields if about.search(name)} - CHANGE_PROBABILITIES - DO_NOT
    assert not new, "a new vLLM: what do these change?"
    assert not arguments.keys() & CHANGE_PROBABILITIES
    for name in ("logits_processors", "speculative_config", "watermark_config"):
        assert fields[name].default is None, name


@pytest.mark.vllm
def test_the_model_folders_defaults_for_sampling_are_not_taken(vllm, tiny_model, tmp_path):
    from vllm.config import ModelConfig

    folder = copied(tiny_model, tmp_path, generation={"temperature": 0.6, "top_p": 0.9})
    arguments = plain_arguments(spec(folder), 64)
    names = ("model", "dtype", "max_model_len")
    taken = {name: arguments[name] for name in names}
    assert ModelConfig(**taken).get_diff_sampling_param() == {"temperature": 0.6, "top_p": 0.9}
    ours = ModelConfig(**taken, generation_config=arguments["generation_config"])
    assert ours.get_diff_sampling_param() == {}


@pytest.mark.vllm
def test_vllm_has_no_logits_processors_of_its_own_but_those_that_are_known(vllm):
    from vllm.v1.sample import logits_processor

    names = {processor.__name__ for processor in logits_processor.BUILTIN_LOGITS_PROCESSORS}
    assert names == {
        "MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor",
    }  # fmt: skip
    assert logits_processor.LOGITSPROCS_GROUP == LOGITS_PROCESSORS


MASKING = {
    "gemma4_mm": "suppress_tokens", "gemma4_unified": "suppress_tokens", "gemma4_mtp": "a drafter",
    "moondream3": "by name", "diffusion_gemma": "by name", "medusa": "a drafter",
    "llama_eagle3": "a drafter", "deepseek_eagle3": "a drafter", "qwen3_eagle3": "a drafter",
    "qwen3_dflash": "a drafter",
}  # fmt: skip
"""Models of vLLM that put logits to minus infinity, and how they are kept out."""


@pytest.mark.vllm
def test_models_that_mask_logits_in_vllm_are_known(vllm):
    folder = Path(vllm.__file__).parent / "model_executor" / "models"
    masks = re.compile(r"def compute_logits\((?:(?!\n    def )[\s\S])*?(?:[\"']-?inf|torch\.inf)")
    masking = {}
    for file in folder.glob("*.py"):
        text = file.read_text()
        if masks.search(text) or "suppress_token" in text or "step_allowed" in text:
            masking[file.stem] = text
    assert masking.keys() <= MASKING.keys(), "a new vLLM: how are these kept out?"
    for name in sampling_rules.OWN_SAMPLING:
        assert any(f"class {name}" in text for text in masking.values()), name


def copied(model, folder, generation=None, **config):
    """Copy a model folder, with a generation_config.json and changes of its config.json."""
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": {"suppress_tokens": [5, 6]}}, r"suppress_tokens = \[5, 6\].*remove it"),
        ({"speculators_config": {}}, "speculators_config.*its verifier"),
        ({"architectures": ["Moondream3ForCausalLM"]}, "Moondream3ForCausalLM, which in vLLM"),
        ({"architectures": ["DiffusionGemmaForConditionalGeneration"]}, "blocks .* by diffusion"),
    ],
)
def test_a_model_that_vllm_samples_otherwise_is_refused(tiny_model, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        check_sampling(copied(tiny_model, tmp_path, **changes))


@pytest.mark.parametrize(
    "generation",
    [
        None,
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "min_p": 0.1},
        {"repetition_penalty": 1.1, "eos_token_id": [1, 2], "suppress_tokens": []},
    ],
)
def test_settings_of_a_model_folder_that_vllm_does_not_take_are_no_obstacle(
    tiny_model, tmp_path, generation
):
    check_sampling(copied(tiny_model, tmp_path, generation=generation))


def test_logits_processors_of_other_packages_are_refused(tiny_model, tmp_path, monkeypatch):
    package = tmp_path / "loud-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: loud\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{LOGITS_PROCESSORS}]\nlouder = loud:Louder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=r"\(louder of loud, in the entry points .*uninstall"):
        check_sampling(str(tiny_model))
