"""Speed of an engine inside the loop, beside the same vLLM alone with the same requests.

    headway bench generate [--size 60m --groups 32]

In each round `offline` is `LLM.generate` with all requests at once, and `loop` a rollout actor that
leases groups, decodes and rewards their texts, and puts them, without training. The figure of merit
is the median of loop / offline, at least 0.95. Takes about four minutes.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness.study import Options, Record, Study, number, option

if TYPE_CHECKING:
    from benchmarks.rollouts.generation_rounds import Sampled

AIM = 0.95


def figures_of(rounds: Sequence[Mapping[str, "Sampled"]]) -> Record:
    """Return medians over rounds, and of the ratios inside each.

    `of_offline_cpu` is the ratio of tokens per CPU second, which other work on the machine disturbs
    less, and which leaves out waiting.
    """

    def ratio(part: str) -> float:
        return float(
            median(getattr(one["offline"], part) / getattr(one["loop"], part) for one in rounds)
        )

    return {
        "tokens_per_second": {
            name: median(one[name].tokens / one[name].seconds for one in rounds)
            for name in ("offline", "loop")
        },
        "of_offline": {"loop": ratio("seconds")},
        "of_offline_cpu": {"loop": ratio("cpu_seconds")},
        "raw": [{name: asdict(sampled) for name, sampled in one.items()} for one in rounds],
    }


def measure(options: Options) -> Iterator[Record]:
    import ray

    from benchmarks.rollouts.generation_rounds import measure_rounds

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield figures_of(asyncio.run(measure_rounds(options, Path(folder))))
    finally:
        ray.shutdown()


def table(record: Record) -> str:
    return (
        f"loop / offline = {record['of_offline']['loop']:.3f} (aim {AIM}); "
        f"of tokens a CPU second {record['of_offline_cpu']['loop']:.3f}"
    )


STUDY = Study(
    name="generate",
    about=__doc__,
    options=(
        option("--rounds", 5, "of both engines", type=number(int, 1)),
        option("--groups", 96, "of 8 rollouts, in a round of an engine", type=number(int, 1)),
        option("--size", "demo", "of the model", choices=("demo", "60m")),
    ),
    file="generate.json",
    measure=measure,
    table=table,
)
