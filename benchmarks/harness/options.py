"""The type of an option that names CPU cores."""

import argparse
import os

from pydantic import TypeAdapter, ValidationError

from queues.runtime.cpu_affinity import Cores, parse_cores


def cores_option(text: str) -> str:
    """Return an option that names CPU cores, as "0" or "0-3".

    Raises:
        ArgumentTypeError: No such list, or cores that this process may not use.
    """
    available = sorted(os.sched_getaffinity(0))
    try:
        TypeAdapter(Cores).validate_python(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of cores, as 0 or 0-3; there are {available}"
        ) from error
    if not set(parse_cores(text)) <= set(available):
        raise argparse.ArgumentTypeError(f"{text!r} names cores that are not of {available}")
    return text
