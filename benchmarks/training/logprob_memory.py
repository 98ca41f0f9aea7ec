"""Measures peak memory and time of log-probabilities: chunk by chunk against the plain way.

    headway bench logprob-memory

Each arm does one forward and one backward pass in a process of its own, arms in turn, so that no
allocator remembers another's tensors:

    plain             float32 logits [N, V] at once, log_softmax, gather; entropies, detached
    chunked           `learner.model.logprobs.chunked_logprobs`, which gives the same
    plain_entropy     the same two with entropies differentiated, as an entropy bonus does
    chunked_entropy

Memory is the peak resident size over what the process held before the pass: hidden states, head and
the libraries are not counted, gradients are. On the CPU only; raw numbers are stored under
benchmarks/results/.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from learner.config.learner import LearnerConfig

ARMS = ("plain", "chunked", "plain_entropy", "chunked_entropy")
SIZES = ("tokens", "vocabulary", "hidden", "chunk", "threads")
TOLERANCE = 1e-4
"""Largest relative difference between arms in what they compute."""


def resident(field: str) -> int:
    """Bytes: VmRSS is what this process holds, VmHWM the most it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}: this needs Linux")


def one_pass(
    arm: str, tokens: int, vocabulary: int, hidden_size: int, chunk: int, threads: int
) -> dict:
    """One forward and backward pass in this process."""
    import torch

    from learner.model.logprobs import chunked_logprobs

    torch.set_num_threads(threads)
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=make).requires_grad_()
    head = (0.02 * torch.randn(vocabulary, hidden_size, generator=make)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=make)
    entropy = arm.endswith("_entropy")
    (hidden[:8] @ head[:8].T).sum().item()  # starts the threads
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    begin, cpu_begin = time.perf_counter(), time.process_time()
    if arm.startswith("chunked"):
        logprobs, entropies = chunked_logprobs(
            hidden, head, targets, temperature=1.0, chunk=chunk, entropy_gradient=entropy
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


def measure(arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """Every arm in a process of its own, `rounds` times in turn."""
    runs: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    options = [f"--{name}={getattr(arguments, name)}" for name in SIZES]
    for _ in range(arguments.rounds):
        for arm in ARMS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.training.logprob_memory",
                "--arm",
                arm,
                *options,
            ]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=arguments.deadline
                )
            except subprocess.TimeoutExpired:
                raise SystemExit(
                    f"{arm} was not done after {arguments.deadline:g} s; give it more with "
                    "--deadline, or less to do with --tokens or --vocabulary"
                ) from None
            if done.returncode:
                raise SystemExit(f"{arm} failed:\n{done.stderr}")
            runs[arm].append(json.loads(done.stdout))
    return runs


def disagreement(runs: dict[str, list[dict]], arm: str, other: str) -> float:
    """Largest relative difference of means and gradient norm between two arms."""
    first, second = runs[arm][0], runs[other][0]
    return max(abs(first[key] / second[key] - 1) for key in ("logprob", "entropy", "gradient_norm"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="positions (N)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="V")
    parser.add_argument("--hidden", type=int, default=512, help="H")
    parser.add_argument(
        "--chunk", type=int, default=LearnerConfig().logprob_chunk, help="positions at a time"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each arm")
    parser.add_argument("--deadline", type=float, default=300, help="seconds a process may take")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wrong = [name for name in (*SIZES, "rounds") if getattr(arguments, name) < 1]
    if wrong:
        parser.error(f"--{wrong[0]} is {getattr(arguments, wrong[0])}; it must be at least 1")
    sizes = [getattr(arguments, name) for name in SIZES]
    if arguments.arm:
        print(json.dumps(one_pass(arguments.arm, *sizes)))
        return
    file = RESULTS / f"logprob_memory_{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    reserve(file)
    runs = measure(arguments)
    differences = {
        other: disagreement(runs, f"chunked{other}", f"plain{other}") for other in ("", "_entropy")
    }
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"the arms compute different things: {differences}")
    medians = {
        arm: {key: statistics.median(run[key] for run in runs[arm]) for key in runs[arm][0]}
        for arm in ARMS
    }
    logits = 4 * arguments.tokens * arguments.vocabulary
    print(f"N = {sizes[0]}, V = {sizes[1]}, H = {sizes[2]}, chunk = {sizes[3]}; ", end="")
    print(f"float32 logits of all tokens: {logits / 2**20:.0f} MiB")
    for arm, median in medians.items():
        print(
            f"{arm:16s} peak {median['peak_bytes'] / 2**20:8.0f} MiB   "
            f"{median['seconds']:6.2f} s, {median['cpu_seconds']:6.2f} s of CPU time "
            f"(median of {arguments.rounds})"
        )
    ratios = {
        f"{key}{other}": medians[f"chunked{other}"][key] / medians[f"plain{other}"][key]
        for other in ("", "_entropy")
        for key in ("peak_bytes", "seconds", "cpu_seconds")
    }
    print("chunked / plain: " + ", ".join(f"{key} {value:.2f}" for key, value in ratios.items()))
    record = environment() | {
        "arguments": vars(arguments),
        "logits_bytes": logits,
        "medians": medians,
        "chunked_over_plain": ratios,
        "raw": runs,
    }
    store(record, file)


if __name__ == "__main__":
    main()
