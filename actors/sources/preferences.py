"""Preference pairs for reward models: a prompt with a better and a worse completion.

A JSONL file has the fields `prompt`, `chosen` and `rejected`; a prompt source yields such tuples
from `preferences(**options)`. No pair has a held-out prompt. `learner.supervised.reward_model`
trains on them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from actors.errors import InputError
from actors.sources.examples import Example, ExampleKind, load_examples

PREFERENCES = ExampleKind(
    "reward_model.pairs", "preferences", ("prompt", "chosen", "rejected"), "preference pairs"
)


class Preference(NamedTuple):
    """Two completions of a prompt."""

    prompt: str
    chosen: str
    rejected: str


def load_preferences(
    name: str, *, options: dict[str, Any], seed: int, heldout: frozenset[str]
) -> Iterator[Preference]:
    """Return endless preference pairs; arguments as in `load_examples`.

    Raises:
        InputError: As in `load_examples`, or completions that are equal, or a source that raised or
            gave something else than pairs. A source may raise it with a later pair.
    """
    examples = load_examples(
        PREFERENCES, name, options=options, seed=seed, heldout=heldout, problem=_problem
    )
    return _checked(examples, f"{PREFERENCES.setting} = {name!r}")


def _checked(examples: Iterator[Any], origin: str) -> Iterator[Preference]:
    """Yield the pairs after checking each: the source may be user code."""
    while True:
        try:
            example = next(examples)
        except StopIteration:
            raise InputError(f"{origin} came to an end; preferences() must be endless") from None
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{origin} raised {error!r}") from error
        texts = isinstance(example, tuple) and all(isinstance(text, str) for text in example)
        if not texts or len(example) != len(PREFERENCES.fields):
            raise InputError(
                f"{origin} gave {example!r}, must give tuples of the texts prompt, chosen, rejected"
            )
        if (wrong := _problem(example)) is not None:
            raise InputError(f"{origin}, prompt {example[0][:40]!r}: {wrong}")
        yield Preference(*example)


def _problem(example: Example) -> str | None:
    _, chosen, rejected = example
    return f"chosen and rejected are both {chosen[:40]!r}" if chosen == rejected else None
