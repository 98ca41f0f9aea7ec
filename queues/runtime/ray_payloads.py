"""Encoded groups in the form that Ray's object store transfers without copies."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from queues.records import Payload


def to_arrays(payloads: Sequence[Payload]) -> list[Any]:
    """Return each payload as an array of uint8, which Ray's receivers read in place.

    `memoryview(array)` is a payload again.
    """
    return [np.frombuffer(payload, dtype=np.uint8) for payload in payloads]
