"""Records of trained batches and of weight updates, as a run writes them."""

from weight_sync.announcements import WeightUpdateReport


def batch_row(version, begin, *, waited=1.0, stepped=2.0, published=0.5, **figures):
    """Return a batch that was awaited from `begin` on; the other times are the seconds it took."""
    return {
        "version": version, "weights_checksum": "", "session_started_at": 1.0,
        "wait_started_at": begin, "wait_finished_at": begin + waited,
        "step_started_at": begin + waited, "step_finished_at": begin + waited + stepped,
        "published_at": begin + waited + stepped + published, **figures,
    }  # fmt: skip


def weight_update(version, published, *, staged=1.0, started=2.0, finished=3.0, **more):
    """Return an update of an engine; its moments are seconds after the publication, or None."""
    moments = {"staged_at": staged, "swap_started_at": started, "swap_finished_at": finished}
    times = {name: None if after is None else published + after for name, after in moments.items()}
    fixed = {"engine_id": "engine-0", "bytes": 7}
    return WeightUpdateReport(version=version, published_at=published, **times, **fixed | more)
