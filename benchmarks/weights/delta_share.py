r"""Share of the weights that the steps of a run changed, and the bytes that `delta` saved.

    headway sft demo
    headway run demo --set weight_sync.codec=delta --set weight_sync.wire_dtype=bfloat16 \
        --set steps=100
    python -m benchmarks.weights.delta_share runs/demo

Reads the recorded updates of a run. Leaves out speed (`headway bench weight-sync`), and the first
version of an engine, which comes whole.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, option
from deploy.errors import InputError
from weight_sync.announcements import WeightUpdateReport


def shares(updates: Sequence[WeightUpdateReport]) -> Record:
    """Return what the updates of a run changed and cost.

    Args:
        updates: The reports in `swaps.jsonl`.

    Returns:
        Updates and how many came by delta; of those the share of elements changed and of bytes
        fetched; bytes of all updates beside those of whole versions.
    """
    taken = [update for update in updates if not update.error and not update.seeding]
    deltas = [update for update in taken if update.codec == "delta"]
    return {
        "updates": len(taken),
        "by_delta": len(deltas),
        "changed": [update.changed for update in deltas],
        "bytes_share": [update.bytes / update.full_bytes for update in deltas],
        "bytes": sum(update.bytes for update in taken),
        "full_bytes": sum(update.full_bytes for update in taken),
    }


def measure(options: Options) -> Iterator[Record]:
    """Read the updates of the run."""
    lines = (options.run / "swaps.jsonl").read_text().splitlines()
    figures = shares([WeightUpdateReport(**json.loads(line)) for line in lines])
    if not figures["by_delta"]:
        raise InputError(f"{options.run}: none of {figures['updates']} updates came by delta")
    yield {"run": options.run.name} | figures


def table(record: Record) -> str:
    """Return medians and extremes."""
    lines = [f"{record['by_delta']} of {record['updates']} updates came by delta"]
    for key in ("changed", "bytes_share"):
        values = record[key]
        extremes = f"{min(values):7.2%} … {max(values):7.2%}"
        lines.append(f"{key:12} median {median(values):7.2%}   {extremes}")
    lines.append(f"bytes of all {record['bytes']:,}, instead of {record['full_bytes']:,}")
    return "\n".join(lines)


STUDY = Study(
    name="benchmarks.weights.delta_share",
    command="python -m",
    about=__doc__,
    options=(option("run", about="folder of a run with weight_sync.codec = delta", type=Path),),
    file="delta_share.json",
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    STUDY.main()
