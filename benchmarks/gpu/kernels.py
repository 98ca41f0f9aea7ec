"""Times of single operations of the learner and of weight updates on a GPU, compared in values too.

Seconds are the least of `rounds`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.learner import PlainEngine, free_memory, peak_memory
from benchmarks.harness.synthetic_load import (
    SIZES,
    Size,
    build,
    lognormal_lengths,
    synchronize,
    timed,
)
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import NAME, attend_packed
from learner.model.policy import Policy, checkpoint_activations
from weight_sync.publish.snapshot import Gpu, Snapshot

MEANS = (250, 1_000, 4_000)
"""Median lengths of the sequences of a row."""
ROW_TOKENS = 16_384
LARGE_BYTES = 5 * 2**28
"""A tensor above 1 GiB, for the handles of `ipc`."""
HEAD_TOKENS = 1_024


def transfers(size_name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a version's way between device and host: snapshot, checksum, copies back."""
    size = SIZES[size_name]
    with device:
        tensors = [*build(size).to(getattr(torch, size.dtype)).named_parameters()]
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    snapshot = Snapshot()
    taken = timed(device, rounds, lambda: snapshot.take(tensors, None, checksummed=False))
    digest = snapshot.take(tensors, None)
    begin = time.perf_counter()
    digest.result()
    figures = {"bytes": nbytes, "snapshot": taken, "checksum_after": time.perf_counter() - begin}
    yield figures
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    sources = {"from_pageable": torch.empty(nbytes, dtype=torch.uint8)}
    if device.type == "cuda":
        sources["from_pinned"] = Gpu().pinned(nbytes)
    for name, source in (sources | {"on_device": torch.empty_like(block)}).items():
        copy = partial(block.copy_, source, non_blocking=name == "from_pinned")
        yield {name: timed(device, rounds, copy)}


def attention(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of packed attention and of one call a sequence, and how far they differ.

    Both are a forward and a backward pass of one layer. `difference` and `gradient_difference` are
    relative to the largest value.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size = SIZES[name]
    attend_packed(build(SIZES["tiny"]))  # registers it
    packed, layer = ALL_ATTENTION_FUNCTIONS[NAME], torch.nn.Module()
    row = min(ROW_TOKENS, size.microbatch_tokens)
    figures: dict[str, Any] = {}
    for mean in MEANS:
        lengths = _lengths(row, mean)
        columns = _columns(size, row, device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)

        ways: dict[str, Callable[..., Tensor]] = {
            "at_once": lambda *columns, at=positions: packed(
                layer, *columns, None, position_ids=at
            )[0],
            "one_by_one": partial(_one_by_one, lengths),
        }
        seconds, results = {}, []
        for way, attend in ways.items():
            both = partial(_both_passes, attend, columns)
            seconds[way] = timed(device, rounds, both)
            results.append(both())
        apart = [_difference(*pair) for pair in zip(*results, strict=True)]
        figures[f"mean {mean}"] = {
            **seconds,
            "sequences": len(lengths),
            "difference": apart[0],
            "gradient_difference": max(apart[1:]),
        }
        yield figures


def _one_by_one(lengths: list[int], *columns: Tensor) -> Tensor:
    """Return attention [1, N, heads, size] of packed sequences by one call each."""
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    )
    parts = zip(*(torch.split(column, lengths, dim=2) for column in columns), strict=True)
    return torch.cat([attend(*part) for part in parts], dim=2).transpose(1, 2)


def _both_passes(attend: Callable[..., Tensor], columns: list[Tensor]) -> list[Tensor]:
    """Return what a function computes of columns, and the gradients of its sum."""
    output = attend(*columns)
    return [output.detach(), *torch.autograd.grad(output.sum(), columns)]


def _lengths(row: int, median: int) -> list[int]:
    """Return lengths that fill a row."""
    ends = accumulate(lognormal_lengths(row, median=median, longest=row, seed=0))
    within = takewhile(lambda end: end < row, ends)
    return [end - begin for begin, end in pairwise([0, *within, row])]


def _columns(size: Size, row: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    return [
        torch.randn(1, heads, row, size.head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    ]


def _difference(first: Any, second: Any) -> float:
    return float((first - second).abs().max() / second.abs().max())


def head(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of the logits of some tokens in each kind of float32, and how far they differ.

    `wide` has float32 factors; `wide_sums` those of the model and float32 sums, as vLLM and
    `learner.float32_head` have on GPUs.
    """
    size = SIZES[name]
    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    hidden = torch.randn(HEAD_TOKENS, size.hidden, device=device).to(dtype)
    weight = torch.randn(size.hidden, size.vocabulary, device=device).to(dtype)
    ways: dict[str, Callable[[], Tensor]] = {
        "model": lambda: hidden @ weight,
        "wide": lambda: hidden.float() @ weight.float(),
    }
    if device.type == "cuda":
        ways["wide_sums"] = lambda: torch.mm(hidden, weight, out_dtype=torch.float32)
    figures: dict[str, Any] = {}
    for way, work in ways.items():
        figures[way] = timed(device, rounds, work)
        if way == "wide_sums":
            figures["difference"] = _difference(work(), ways["wide"]())
        yield figures


def memory(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the peak bytes of a microbatch of 16,384 tokens, with and without checkpoints."""
    size = replace(
        SIZES[name], microbatch_tokens=min(ROW_TOKENS, SIZES[name].microbatch_tokens * 2)
    )
    figures: dict[str, Any] = {"tokens": size.microbatch_tokens}
    for kind, checkpoints in (("kept", False), ("computed_again", True)):
        free_memory(device)
        try:
            figures[kind] = _pass(size, device, checkpoints=checkpoints)
        except torch.OutOfMemoryError as error:
            figures[kind] = {"failed": str(error).splitlines()[0]}
        yield figures


def _pass(size: Size, device: torch.device, *, checkpoints: bool) -> dict[str, float]:
    """Compute a microbatch forward and backward."""
    with device:
        model = build(size)
    attend_packed(model)
    model = model.to(getattr(torch, size.dtype))
    if checkpoints:
        checkpoint_activations(model, "a model with random weights")
        model.train()
    engine = PlainEngine(Policy(model, LogprobOptions(chunk=1024)))
    columns = _microbatch(size)
    begin = time.perf_counter()
    engine.backward(engine.forward(*columns).logprobs.mean())
    synchronize(device)
    return {"seconds": time.perf_counter() - begin, **peak_memory(device)}


def _microbatch(size: Size) -> tuple[Tensor, Tensor]:
    """Return random tokens that fill a microbatch, and their positions."""
    row = size.microbatch_tokens
    positions = [torch.arange(length) for length in _lengths(row, size.tokens)]
    return torch.randint(0, size.vocabulary, (row,)), torch.cat(positions)


def ipc(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield if another process reads a tensor above 1 GiB by its handle, and its seconds."""
    nbytes = LARGE_BYTES if device.type == "cuda" else 2**20
    tensor = torch.arange(nbytes // 4, dtype=torch.int32, device=device)
    context = torch.multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    reader = context.Process(target=_read, args=(tensors, sums), daemon=True)
    reader.start()
    begin = time.perf_counter()
    tensors.put(tensor)
    total = sums.get(timeout=120)
    seconds, equal = time.perf_counter() - begin, total == int(tensor.sum())
    yield {"bytes": nbytes, "equal": equal, "seconds": seconds}
    reader.join(timeout=30)


def _read(tensors: Any, sums: Any) -> None:
    sums.put(int(tensors.get().sum()))


def zero(name: str, device: torch.device, rounds: int, *, stage: int) -> Iterator[dict[str, Any]]:
    """Yield seconds and peak bytes of steps of the engine of real runs at one stage of ZeRO."""
    from learner.config.optimizer import OptimizerConfig
    from learner.engine.deepspeed import PolicyEngine

    size = SIZES[name]
    model = build(size).to(getattr(torch, size.dtype))
    engine = PolicyEngine(
        Policy(model, LogprobOptions(chunk=1024)),
        OptimizerConfig(learning_rate=1e-6),
        model_path="",
        zero_stage=stage,
        total_steps=100,
    )
    columns = _microbatch(size)

    def step() -> None:
        engine.backward(engine.forward(*columns).logprobs.mean())
        engine.step()

    step_seconds = timed(device, 3, step)
    figures = {"tokens": size.microbatch_tokens, "step": step_seconds, **peak_memory(device)}
    yield figures
    digest = timed(device, 1, lambda: Snapshot().take(engine.weights(), None).result())
    yield figures | {"publish": digest}


zero1, zero2, zero3 = (partial(zero, stage=stage) for stage in (1, 2, 3))
