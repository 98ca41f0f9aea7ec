"""Preferences for reward models: of two completions of a prompt, the better and the worse one.

A JSONL file has the fields `prompt`, `chosen` and `rejected`; a prompt source has them if it offers
`preferences(**options)`. No pair has a held-out prompt. Leaves out how they are tokenised and
trained (`learner.supervised.reward_model`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from actors.errors import InputError
from actors.sources.examples import Example, Kind, load_examples

KIND = Kind(
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
    """Endless preference pairs; arguments as `load_examples`.

    Raises:
        InputError: As `load_examples`, or completions that are equal, or a source that raised or
            gave something else than pairs; of a source all but the first come with a later pair.
    """
    examples = load_examples(
        KIND, name, options=options, seed=seed, heldout=heldout, problem=_problem
    )
    return _checked(examples, f"{KIND.setting} = {name!r}")


def _checked(examples: Iterator[Any], place: str) -> Iterator[Preference]:
    """The pairs, each looked at when it is drawn: a source of the user's gives what it likes."""
    while True:
        try:
            example = next(examples)
        except StopIteration:
            raise InputError(f"{place} came to an end; preferences() must be endless") from None
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{place} raised {error!r}") from error
        texts = isinstance(example, tuple) and all(isinstance(text, str) for text in example)
        if not texts or len(example) != len(KIND.fields):
            raise InputError(
                f"{place} gave {example!r}, must give tuples of the texts prompt, chosen, rejected"
            )
        if (wrong := _problem(example)) is not None:
            raise InputError(f"{place}, prompt {example[0][:40]!r}: {wrong}")
        yield Preference(*example)


def _problem(example: Example) -> str | None:
    _, chosen, rejected = example
    return f"chosen and rejected are both {chosen[:40]!r}" if chosen == rejected else None
