"""Peak memory and time of log-probabilities: chunk by chunk, and all at once.

    headway bench logprob-memory

Each variant does one forward and one backward pass in a process of its own, variants in turn, so
that no allocator remembers another's tensors:

    plain             float32 logits [N, V] at once, log_softmax, gather; entropies, detached
    chunked           `learner.model.logprobs.chunked_logprobs`, which gives the same
    plain_entropy     the same two with entropies differentiated, as an entropy bonus does
    chunked_entropy

Memory is the peak resident size over what the process held before the pass: hidden states, head and
the libraries are not counted, gradients are. On the CPU only.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, number, option, text_table
from benchmarks.harness.subprocesses import call_in_process
from deploy.errors import RunFailed
from learner.config.learner import LearnerConfig

VARIANTS = ("plain", "chunked", "plain_entropy", "chunked_entropy")
TOLERANCE = 1e-4
"""Largest relative difference between variants in what they compute."""


def resident(field: str) -> int:
    """Return bytes: VmRSS is what this process holds, VmHWM the most it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RunFailed(f"/proc/self/status has no {field}: this needs Linux")


def one_pass(variant: str, options: Options) -> Record:
    """Do one forward and backward pass in this process."""
    import torch

    from learner.model.logprobs import chunked_logprobs

    torch.set_num_threads(options.threads)
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=make).requires_grad_()
    head = (0.02 * torch.randn(options.vocabulary, options.hidden, generator=make)).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=make)
    entropy = variant.endswith("_entropy")
    (hidden[:8] @ head[:8].T).sum().item()  # starts the threads
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    begin, cpu_begin = time.perf_counter(), time.process_time()
    if variant.startswith("chunked"):
        logprobs, entropies = chunked_logprobs(
            hidden,
            head,
            targets,
            temperature=1.0,
            chunk=options.chunk,
            entropy_gradient=entropy,
        )
    else:
        scores = (hidden @ head.T).float().log_softmax(-1)
        logprobs = scores.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy):
            entropies = -(scores.exp() * scores).sum(-1)
    loss = logprobs.mean() + (entropies.mean() if entropy else 0.0)
    loss.backward()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return {
        "peak_bytes": resident("VmHWM") - before,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "logprob": logprobs.mean().item(),
        "entropy": entropies.mean().item(),
        "gradient_norm": head.grad.norm().item(),
    }


def measure(options: Options) -> Iterator[Record]:
    """Run every variant in a process of its own, `rounds` times in turn."""
    yield {"logits_bytes": 4 * options.tokens * options.vocabulary}
    raw: dict[str, list[Record]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            try:
                figures = call_in_process(one_pass, variant, options, seconds=options.deadline)
            except TimeoutError:
                raise RunFailed(
                    f"{variant} was not done after {options.deadline:g} s; give it more with "
                    "--deadline, or less to do with --tokens or --vocabulary"
                ) from None
            raw[variant].append(figures)
    yield {"raw": raw}


def conclude(record: Record) -> Record:
    """Return medians, and ratios of the chunked to the plain variants.

    Raises:
        RunFailed: The variants compute different things.
    """
    if "raw" not in record:
        return {}
    raw, ratios = record["raw"], {}
    medians = {
        variant: {key: median(run[key] for run in runs) for key in runs[0]}
        for variant, runs in raw.items()
    }
    for suffix in ("", "_entropy"):
        chunked, plain = medians[f"chunked{suffix}"], medians[f"plain{suffix}"]
        for key in ("logprob", "entropy", "gradient_norm"):
            if abs(chunked[key] / plain[key] - 1) > TOLERANCE:
                raise RunFailed(
                    f"variants compute different things: {key}{suffix} is {chunked[key]} chunked "
                    f"and {plain[key]} plain"
                )
        for key in ("peak_bytes", "seconds", "cpu_seconds"):
            ratios[f"{key}{suffix}"] = chunked[key] / plain[key]
    return {"medians": medians, "chunked_over_plain": ratios}


def table(record: Record) -> str:
    """Return the medians and ratios."""
    rows = [
        [
            variant,
            f"{figures['peak_bytes'] / 2**20:.0f}",
            f"{figures['seconds']:.2f}",
            f"{figures['cpu_seconds']:.2f}",
        ]
        for variant, figures in record["medians"].items()
    ]
    logits = f"float32 logits of all tokens: {record['logits_bytes'] / 2**20:.0f} MiB"
    ratios = (f"{key} {value:.2f}" for key, value in record["chunked_over_plain"].items())
    text = text_table(["median", "peak MiB", "seconds", "CPU seconds"], rows, logits)
    return f"{text}\nchunked / plain: {', '.join(ratios)}"


COUNT = number(int, 1)
STUDY = Study(
    name="logprob-memory",
    about=__doc__,
    options=(
        option("--tokens", 4096, "positions, N", type=COUNT),
        option("--vocabulary", 32768, "V", type=COUNT),
        option("--hidden", 512, "hidden size", type=COUNT),
        option("--chunk", LearnerConfig().logprob_chunk, "positions at a time", type=COUNT),
        option("--threads", 1, "of torch", type=COUNT),
        option("--rounds", 3, "processes of each variant", type=COUNT),
        option("--deadline", 300.0, "seconds a process may take"),
    ),
    file="logprob_memory_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
)

if __name__ == "__main__":
    STUDY.main()
