"""Times of single operations of the learner and of weight updates on a GPU, compared in values too.

Seconds are the least of `rounds`.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
import xxhash
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
from learner.model.compilation import start_compiler
from learner.model.logprobs import LogprobOptions, chunked_logprobs
from learner.model.packed_attention import NAME, attend_packed
from learner.model.policy import Policy, checkpoint_activations, prepare
from weight_sync.publish.snapshot import Gpu, Snapshot, bytes_of

ROWS = ((250, None), (1_000, None), (4_000, None), (1_000, 512))
"""Median lengths of the sequences of a row, and the window of its attention."""
ROW_TOKENS = 16_384
LARGE_BYTES = 5 * 2**28
"""A tensor above 1 GiB, for the handles of `ipc`."""
HEAD_TOKENS = 1_024
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Difference that rounding explains, relative to the largest value."""


def imports(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of importing what the other parts import, which they then find in memory."""
    for module in ("transformers", "deepspeed"):
        if importlib.util.find_spec(module):
            begin = time.perf_counter()
            importlib.import_module(module)
            yield {module: time.perf_counter() - begin}
    yield {"claims": {"torch sees the device": device.type == "cpu" or torch.cuda.is_available()}}


def transfers(size_name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a version's way between device and host: snapshot, checksum, copies back."""
    size = SIZES[size_name]
    with device:
        tensors = [*build(size).to(getattr(torch, size.dtype)).named_parameters()]
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    snapshot = Snapshot()
    taken = timed(device, rounds, lambda: snapshot.take(tensors, None, checksummed=False))
    yield {"bytes": nbytes, "snapshot": taken}
    synchronous = xxhash.xxh3_64()
    for tensor_name, tensor in tensors:
        synchronous.update(tensor_name.encode())
        synchronous.update(bytes_of(tensor.cpu()))
    digest, begin = snapshot.take(tensors, None), time.perf_counter()
    torch._foreach_zero_([tensor.data for _, tensor in tensors])  # the next step begins
    equal = digest.result() == synchronous.hexdigest()
    claims = {"the checksum is that of a synchronous copy": equal}
    yield {"checksum_after": time.perf_counter() - begin, "claims": claims}
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    sources = {"from_pageable": torch.empty(nbytes, dtype=torch.uint8)}
    if device.type == "cuda":
        sources["from_pinned"] = Gpu().pinned(nbytes)
    for name, source in (sources | {"on_device": torch.empty_like(block)}).items():
        copy = partial(block.copy_, source, non_blocking=name == "from_pinned")
        yield {name: timed(device, rounds, copy)}


def attention(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of packed attention and of one call a sequence, and how far they differ.

    Both are a forward and a backward pass of one layer, with a window in the last row.
    `difference` and `gradient_difference` are relative to the largest value.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size = SIZES[name]
    attend_packed(build(SIZES["tiny"]))  # registers it
    packed, layer = ALL_ATTENTION_FUNCTIONS[NAME], torch.nn.Module()
    row = min(ROW_TOKENS, size.microbatch_tokens)
    figures: dict[str, Any] = {"claims": {}}
    for mean, at_most in ROWS:
        lengths, window = _lengths(row, mean), at_most and min(at_most, row // 4)
        columns = _columns(size, row, device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)

        ways: dict[str, Callable[..., Tensor]] = {
            "at_once": lambda *columns, at=positions, window=window: packed(
                layer, *columns, window, position_ids=at
            )[0],
            "one_by_one": partial(_one_by_one, lengths, window),
        }
        seconds, results = {}, []
        for way, attend in ways.items():
            both = partial(_both_passes, attend, columns)
            seconds[way] = timed(device, rounds, both)
            results.append(both())
        apart = [_difference(*pair) for pair in zip(*results, strict=True)]
        row_name = f"mean {mean}" + (f", window {window}" if window else "")
        holds = max(apart) <= ROUNDING[columns[0].dtype]
        figures["claims"] |= {f"{row_name}: packed attention equals one call a sequence": holds}
        figures[row_name] = {
            **seconds,
            "sequences": len(lengths),
            "difference": apart[0],
            "gradient_difference": max(apart[1:]),
        }
        yield figures


def _one_by_one(lengths: list[int], window: int | None, *columns: Tensor) -> Tensor:
    """Return attention [1, N, heads, size] of packed sequences by one call each."""
    outputs, attend = [], torch.nn.functional.scaled_dot_product_attention
    split = (torch.split(column, lengths, dim=2) for column in columns)
    for query, key, value in zip(*split, strict=True):
        mask = None
        if window is not None:
            square = torch.ones(2 * query.shape[2:3], dtype=torch.bool, device=query.device)
            mask = square.tril().triu(1 - window)
        causal = mask is None
        outputs.append(attend(query, key, value, mask, is_causal=causal, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


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
    figures: dict[str, Any] = {"difference": {}}
    for way, work in ways.items():
        figures[way] = timed(device, rounds, work)
        figures["difference"][way] = _difference(work(), ways["wide"]())
        yield figures
    allowed = {"model": ROUNDING[dtype], "wide": 0.0, "wide_sums": 1e-4}
    apart = figures["difference"].items()
    yield {
        "claims": {f"{way} logits are near the wide ones": d <= allowed[way] for way, d in apart}
    }


def sums(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of log-probabilities, entropies and their gradients, in place and compiled.

    `differences` are relative to the largest value: of their sum, and of the gradients of hidden
    states and weights.
    """
    size = SIZES[name]
    torch.manual_seed(0)
    factors = [torch.randn(n, size.hidden, device=device) for n in (HEAD_TOKENS, size.vocabulary)]
    factors[1] /= size.hidden**0.5
    columns = [factor.to(getattr(torch, size.dtype)).requires_grad_() for factor in factors]
    targets = torch.randint(size.vocabulary, (HEAD_TOKENS,), device=device)
    start_compiler(device)
    figures: dict[str, Any] = {}
    results = []
    for way, compiled in (("in_place", False), ("compiled", True)):
        options = LogprobOptions(chunk=HEAD_TOKENS, entropy_gradient=True, compiled=compiled)
        both = partial(_both_passes, partial(_scores, targets, options), columns)
        figures[way] = timed(device, rounds, both)
        results.append(both())
        yield figures
    apart = [_difference(*pair) for pair in zip(*results, strict=True)]
    holds = max(apart) <= ROUNDING[columns[0].dtype]
    yield {"differences": apart, "claims": {"compiled sums equal those in place": holds}}


def _scores(targets: Tensor, options: LogprobOptions, hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.stack(chunked_logprobs(hidden, weight, targets, options))


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
    most = [figures[kind].get("bytes", math.inf) for kind in ("computed_again", "kept")]
    fits, saves = "failed" not in figures["computed_again"], most[0] < most[1]
    yield {"claims": {"checkpoints save memory": fits and (saves or device.type == "cpu")}}


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
    claims = {"the other process reads the same": equal}
    yield {"bytes": nbytes, "seconds": seconds, "claims": claims}
    reader.join(timeout=30)


def _read(tensors: Any, sums: Any) -> None:
    sums.put(int(tensors.get().sum()))


def zero(
    name: str, device: torch.device, rounds: int, *, stage: int, compiled: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield seconds and peak bytes of steps of the engine of real runs at one stage of ZeRO.

    The engine compares its forward pass with the model's own, and refuses to start if they differ.
    It is `compiled` as runs on GPUs are by default.
    """
    from learner.config.optimizer import OptimizerConfig
    from learner.engine.deepspeed import PolicyEngine

    size = SIZES[name]
    model = build(size).to(getattr(torch, size.dtype))
    policy = Policy(model, LogprobOptions(chunk=1024, compiled=compiled))
    if compiled:
        if device.type == "cpu":  # a trial, for which C++ would be compiled for a minute or two
            torch.compiler.set_stance("force_eager")
        start_compiler(device)
        prepare(policy, "a model with random weights", attention="sdpa", compiled=True)
    engine = PolicyEngine(
        policy,
        OptimizerConfig(learning_rate=1e-6),
        model_path="",
        zero_stage=stage,
        total_steps=100,
    )
    columns = _microbatch(size)
    digests: list[str] = []

    def step() -> None:
        engine.backward(engine.forward(*columns).logprobs.mean())
        engine.step()

    def publish() -> None:
        digests.append(Snapshot().take(engine.weights(), None).result())

    publish()
    step_seconds = timed(device, 3, step)
    yield {"tokens": size.microbatch_tokens, "step": step_seconds, **peak_memory(device)}
    seconds = timed(device, 1, publish)
    yield {"publish": seconds, "claims": {"steps change the weights": len(set(digests)) == 2}}


zero1, zero2, zero3 = (partial(zero, stage=stage) for stage in (1, 2, 3))
zero1_compiled = partial(zero, stage=1, compiled=True)
