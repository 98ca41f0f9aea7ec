r"""Reports how many weights the steps of a run changed, and what that saved: of a run by delta.

    headway sft demo
    headway run demo --set weight_sync.codec=delta --set weight_sync.wire_dtype=bfloat16 \
        --set steps=100
    python -m benchmarks.weights.delta_share runs/demo

Reads what the run recorded of every update; the figures are stored under benchmarks/results/.
Leaves out speed (`headway bench weight-sync`), and first versions of an engine, which come whole.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from weight_sync.announcements import WeightUpdateReport


def shares(swaps: Sequence[WeightUpdateReport]) -> dict[str, Any]:
    """What updates of a run changed and cost.

    Args:
        swaps: The reports in `swaps.jsonl`.

    Returns:
        Updates and how many came by delta; of those the share of elements changed and of bytes
        fetched; bytes of all updates beside those of whole versions.
    """
    taken = [swap for swap in swaps if not swap.error and not swap.seeding]
    deltas = [swap for swap in taken if swap.codec == "delta"]
    return {
        "updates": len(taken),
        "by_delta": len(deltas),
        "changed": [swap.changed for swap in deltas],
        "bytes_share": [swap.bytes / swap.full_bytes for swap in deltas],
        "bytes": sum(swap.bytes for swap in taken),
        "full_bytes": sum(swap.full_bytes for swap in taken),
    }


def main() -> None:
    """Prints medians and extremes, and stores every update's figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run with weight_sync.codec = delta")
    run = parser.parse_args().run
    file = RESULTS / "delta_share.json"
    reserve(file)
    lines = (run / "swaps.jsonl").read_text().splitlines()
    found = shares([WeightUpdateReport(**json.loads(line)) for line in lines])
    if not found["by_delta"]:
        raise SystemExit(f"{run}: none of {found['updates']} updates came by delta")
    print(f"{found['by_delta']} of {found['updates']} updates came by delta")
    for key in ("changed", "bytes_share"):
        values = found[key]
        print(
            f"{key:12} median {statistics.median(values):7.2%}   "
            f"{min(values):7.2%} … {max(values):7.2%}"
        )
    print(f"bytes of all {found['bytes']:,}, instead of {found['full_bytes']:,}")
    store(environment() | {"run": run.name} | found, file)


if __name__ == "__main__":
    main()
