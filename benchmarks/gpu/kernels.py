"""Times of single operations of the learner and of weight updates on a GPU, compared in values too.

Every part yields its figures so far. Seconds are the least of `rounds`.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.learner import PlainEngine
from benchmarks.harness.synthetic_load import (
    SIZES,
    Size,
    build,
    lognormal_lengths,
    synchronize,
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


def timed(device: torch.device, rounds: int, work: Callable[[], object]) -> float:
    """Return the least seconds of a call, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def transfers(name: str, device: torch.device, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a version's way between device and host: snapshot, checksum, copies back."""
    size = SIZES[name]
    with device:
        tensors = [*build(size).to(getattr(torch, size.dtype)).named_parameters()]
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    snapshot = Snapshot()
    digests: list[Callable[[], str]] = []
    taken = timed(device, rounds, lambda: digests.append(snapshot.take(tensors, None)))
    begin = time.perf_counter()
    digests[-1]()
    figures = {"bytes": nbytes, "snapshot": taken, "checksum_after": time.perf_counter() - begin}
    yield figures
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    own = torch.empty(nbytes, dtype=torch.uint8)
    figures["from_pageable"] = timed(device, rounds, lambda: block.copy_(own))
    yield figures
    if device.type == "cuda":
        pinned = Gpu().pinned(nbytes)
        figures["from_pinned"] = timed(
            device, rounds, lambda: block.copy_(pinned, non_blocking=True)
        )
        yield figures
    target = torch.empty_like(block)
    yield figures | {"on_device": timed(device, rounds, lambda: target.copy_(block))}


def attention(name: str, device: torch.device, *, rounds: int) -> Iterator[dict[str, Any]]:
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

        def at_once(columns: list[Tensor] = columns, positions: Tensor = positions) -> Tensor:
            output: Tensor = packed(layer, *columns, None, position_ids=positions)[0]
            return output

        def one_by_one(columns: list[Tensor] = columns, lengths: list[int] = lengths) -> Tensor:
            parts = zip(*(torch.split(column, lengths, dim=2) for column in columns), strict=True)
            attend = torch.nn.functional.scaled_dot_product_attention
            outputs = [
                attend(query, key, value, is_causal=True, enable_gqa=True)
                for query, key, value in parts
            ]
            return torch.cat(outputs, dim=2).transpose(1, 2)

        found, gradients = {}, []
        for way in (at_once, one_by_one):

            def both(
                way: Callable[[], Tensor] = way, columns: list[Tensor] = columns
            ) -> list[Tensor]:
                output = way()
                return [output.detach(), *torch.autograd.grad(output.sum(), columns)]

            found[way.__name__] = timed(device, rounds, both)
            gradients.append(both())
        apart = [_difference(*pair) for pair in zip(*gradients, strict=True)]
        figures[f"mean {mean}"] = {
            **found,
            "sequences": len(lengths),
            "difference": apart[0],
            "gradient_difference": max(apart[1:]),
        }
        yield figures


def _lengths(row: int, median: int) -> list[int]:
    """Return lengths that fill a row."""
    lengths: list[int] = []
    for length in lognormal_lengths(row, median=median, longest=row, seed=0):
        lengths.append(min(length, row - sum(lengths)))
        if sum(lengths) == row:
            break
    return lengths


def _columns(size: Size, row: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    return [
        torch.randn(1, heads, row, size.head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    ]


def _difference(first: Any, second: Any) -> float:
    return float((first - second).abs().max() / second.abs().max())


def head(name: str, device: torch.device, *, rounds: int) -> Iterator[dict[str, Any]]:
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


TIMED = (transfers, attention, head)
"""Parts that take a number of rounds."""


def memory(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the peak bytes of a microbatch of 16,384 tokens, with and without checkpoints."""
    size = replace(
        SIZES[name], microbatch_tokens=min(ROW_TOKENS, SIZES[name].microbatch_tokens * 2)
    )
    figures: dict[str, Any] = {"tokens": size.microbatch_tokens}
    for kind, checkpoints in (("kept", False), ("computed_again", True)):
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
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
    engine = PlainEngine(Policy(model, LogprobOptions(chunk=1024)), learning_rate=1e-6)
    lengths = _lengths(size.microbatch_tokens, size.tokens)
    tokens = torch.randint(0, size.vocabulary, (size.microbatch_tokens,))
    positions = torch.cat([torch.arange(length) for length in lengths])
    begin = time.perf_counter()
    engine.backward(engine.forward(tokens, positions).logprobs.mean())
    synchronize(device)
    figures = {"seconds": time.perf_counter() - begin}
    if device.type == "cuda":
        figures["bytes"] = float(torch.cuda.max_memory_allocated(device))
    return figures


def ipc(device: torch.device) -> Iterator[dict[str, Any]]:
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


def zero(name: str, device: torch.device, stage: int) -> Iterator[dict[str, Any]]:
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
        dtype=size.dtype,
        total_steps=100,
    )
    row = size.microbatch_tokens
    tokens = torch.randint(0, size.vocabulary, (row,))
    positions = torch.cat([torch.arange(length) for length in _lengths(row, size.tokens)])

    def step() -> None:
        engine.backward(engine.forward(tokens, positions).logprobs.mean())
        engine.step()

    figures: dict[str, Any] = {"tokens": row, "step": timed(device, 3, step)}
    if device.type == "cuda":
        figures["bytes"] = torch.cuda.max_memory_allocated(device)
    yield figures
    digest = timed(device, 1, lambda: Snapshot().take(engine.weights(), None)())
    yield figures | {"publish": digest}
