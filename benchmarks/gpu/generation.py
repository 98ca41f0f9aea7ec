"""The engine's parts of the suite: tokens/s beside the limit of memory bandwidth, and its pause.

A step of decoding reads all weights once, and of each sequence its keys and values, so n sequences
cannot make more tokens/s than n · bandwidth / (weights + n · keys and values), in bytes. The
bandwidth is that of copying, measured in the same process.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.synthetic_load import SIZES, Size, build, timed

PROMPT, TOKENS = 32, 256
AT_ONCE = (1, 16, 128, 512)
COPIED_BYTES = {"cuda": 2**31, "cpu": 2**28}
ELEMENT_BYTES = 2


def roofline(size: Size, parameters: int, bandwidth: float, at_once: int) -> float:
    """Return the tokens/s of so many sequences at once, by `bandwidth` in bytes a second alone."""
    context = PROMPT + TOKENS / 2
    kept = 2 * size.layers * size.kv_heads * size.head_size * ELEMENT_BYTES * context
    return at_once * bandwidth / (ELEMENT_BYTES * parameters + at_once * kept)


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that copying reads and writes together, the best of ten."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(device, 10, lambda: target.copy_(source))


def generation(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the rates of `LLM.generate` with fixed lengths, by number of requests."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    size = SIZES[name]
    copied = bandwidth(device)
    torch.manual_seed(0)
    with device:
        model = build(size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield {"bandwidth": copied, "parameters": parameters}
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(Path(folder))
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM takes its share of what is free
        from vllm import LLM, SamplingParams
        from vllm.inputs import tokens_input

        llm = LLM(
            model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024,
            max_num_seqs=max(AT_ONCE), enable_prefix_caching=False, gpu_memory_utilization=0.6,
        )  # fmt: skip
        sampling = SamplingParams(
            max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, temperature=1.0
        )
        rates: dict[str, dict[str, float]] = {}
        for at_once in AT_ONCE:
            prompts = [tokens_input([1 + i % 60] * PROMPT) for i in range(at_once)]
            generate = partial(llm.generate, prompts, sampling, use_tqdm=False)
            best = at_once * TOKENS / timed(device, 2, generate)
            allowed = roofline(size, parameters, copied, at_once)
            rates[str(at_once)] = {
                "tokens_per_second": best, "roofline": allowed, "share": best / allowed,
            }  # fmt: skip
            yield {"at_once": rates}
        claims = {"no rate is above the roofline": all(r["share"] < 1 for r in rates.values())}
        yield {"claims": claims}


def pause(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the record of `headway bench update-pause`, and if its aim is met."""
    from benchmarks.weights import update_pause

    options = update_pause.PauseOptions(size=name, dtype="bfloat16", rounds=7)
    for record in update_pause.measure(options):
        concluded = record | update_pause.conclude(record)
        claim = "a swap takes at most an empty pause and two bare loads"
        yield concluded | {"claims": {claim: concluded["ratio"] <= 1}}
