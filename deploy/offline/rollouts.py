"""Reads the rollouts of a trained batch as text, for `headway rollouts`."""

from typing import Any

from actors.engines.model_folder import load_tokenizer
from deploy.observability.samples import Sample, decode_samples
from deploy.preflight.models import model_path
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from queues.readers.accounting import read_batches
from queues.readers.checkpoints import newest_checkpoint
from queues.readers.recorded_batches import read_batch


def read_samples(directory: RunDirectory, version: int | None) -> list[Sample]:
    """Return the rollouts of the batch that was trained at a version; None: the newest."""
    trained = [row["version"] for row in read_batches(directory.path)]
    if not trained:
        raise InputError(f"{directory.path} has trained no batch yet")
    version = trained[-1] if version is None else version
    if version not in trained:
        raise InputError(
            f"--version {version}: no batch was trained at it; there are 0 to {trained[-1]}"
        )
    payloads = read_batch(directory.path, version)
    return [*decode_samples(payloads, version, policy_tokenizer(directory))]


def policy_tokenizer(directory: RunDirectory) -> Any:
    """Load the tokenizer of a run's policy: that of its newest checkpoint, or of its model."""
    saved = newest_checkpoint(directory.path)
    return load_tokenizer(str(saved[1]) if saved else model_path(directory.config()))
