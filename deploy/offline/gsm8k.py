"""Writes the grade-school problems of GSM8K as the two files that shipped recipes read.

    python -m deploy.offline.gsm8k data

It needs the hub or a copy in its cache, and the library `datasets` (extra of that name).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from actors.sources.hub_dataset import DatasetOptions, dataset_rows
from headway.atomic_file import atomic_file
from headway.errors import HeadwayError, InputError

NAME = "openai/gsm8k"
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


def prompt_row(row: Mapping[str, str]) -> dict[str, str]:
    """Return a prompt and its answer: the number after the last "####" of the solution."""
    question, solution = row["question"], row["answer"]
    _, mark, number = solution.rpartition("####")
    if not (mark and number.strip()):
        raise InputError(f"the solution of {question!r} ends without #### and a number")
    return {
        "prompt": f"{question.strip()}\n{INSTRUCTION}",
        "answer": number.strip().replace(",", ""),
    }


def main(folder: str = "data") -> None:
    """Write `gsm8k_train.jsonl` and `gsm8k_test.jsonl` into a folder, each whole or not at all."""
    for split in ("train", "test"):
        path = Path(folder) / f"gsm8k_{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            for _, row in dataset_rows(NAME, split, DatasetOptions(config="main")):
                if isinstance(row, ValueError):
                    raise InputError(f"{NAME}, split {split!r}: {row}")
                file.write(json.dumps(prompt_row(row), ensure_ascii=False).encode() + b"\n")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except HeadwayError as error:
        sys.stderr.write(f"headway: {error}\n")
        sys.exit(error.exit_code)
