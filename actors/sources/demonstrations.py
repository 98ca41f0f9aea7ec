"""Demonstrations for a supervised warm start: (prompt, completion) pairs from a file or a source.

A JSONL file has the fields `prompt` and `completion`; a prompt source has them if it offers
`demonstrations(**options)`. No pair has a held-out prompt. Leaves out how they are tokenised and
trained (`learner.supervised.sft`).
"""

from collections.abc import Iterator
from typing import Any

from actors.sources.examples import Kind, load_examples

TURN = "\x1e"
"""In a prompt: there the policy ended an earlier message. It becomes the end-of-sequence token."""

KIND = Kind("sft.demonstrations", "demonstrations", ("prompt", "completion"), "worked examples")


def load_demonstrations(
    name: str, *, options: dict[str, Any], seed: int, heldout: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs; arguments and errors as `load_examples`."""
    examples = load_examples(KIND, name, options=options, seed=seed, heldout=heldout)
    return ((prompt, completion) for prompt, completion in examples)
