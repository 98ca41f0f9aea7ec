"""The paths of a rollout: what the policy saw before each token, where histories fork.

    row       a b c d e | f g h | i j          segments (5, parent 0, prefix 3), (8, parent 1, 5)
    paths     a b c d e
              a b c f g h                      context: a b c
              a b c f g i j                    context: a b c f g

A path is a sequence of its own for a model. Its last tokens are those of its segment, which train
there; those before them are context.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from queues.records import Rollout, Segment


def spans(segments: Sequence[Segment], length: int) -> list[tuple[int, int]]:
    """Return where the tokens of each segment begin and end in a row of `length` tokens."""
    starts = [0, *(segment.start for segment in segments)]
    return [*zip(starts, [*starts[1:], length], strict=True)]


def paths(rollout: Rollout) -> list[npt.NDArray[np.int64]]:
    """Return the path of each segment as indices in `Rollout.token_ids`."""
    own = [np.arange(*span) for span in spans(rollout.segments, len(rollout.token_ids))]
    routes = own[:1]
    for segment, tokens in zip(rollout.segments, own[1:], strict=True):
        routes.append(np.concatenate([routes[segment.parent][: segment.prefix], tokens]))
    return routes


def are_segments(
    segments: Sequence[Segment], prompt_length: int, loss_mask: npt.NDArray[np.bool_]
) -> bool:
    """Return True if these can be the further segments of a rollout with this mask [N].

    Starts ascend from the end of the prompt on, a parent is an earlier segment, and `prefix` is at
    most the length of its path. Where it is 0, nothing is shared, and the segment's first token is
    not sampled: a model gives no probability to the first token of a path.
    """
    length, last, path_lengths = len(loss_mask), prompt_length - 1, list[int]()
    for (start, end), segment in zip(spans(segments, length), (None, *segments), strict=True):
        prefix = 0
        if segment is not None:
            _, parent, prefix = segment
            if any(type(value) is not int for value in segment) or not last < start < length:
                return False
            if not 0 <= parent < len(path_lengths) or not 0 <= prefix <= path_lengths[parent]:
                return False
            if not prefix and loss_mask[start]:
                return False
            last = start
        path_lengths.append(prefix + end - start)
    return True
