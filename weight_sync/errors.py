"""Errors of weight synchronisation.

WeightSyncError                  exit code 1
├── InputError                   exit code 2: a setting the user gave is wrong
├── ManifestError                a manifest contradicts itself, or cannot be read
├── IncompatibleWeights          names, shapes or dtypes are not those of the engine
├── VersionOrderError            a version that is not newer than the last one
├── StagingError                 a bucket is missing, truncated, unsealed or fails its checksum
│   └── WrongBase                a delta was made for other weights than those that are here
├── LoadFailed                   the engine was touched and lives: a full re-send repairs it
├── NotNow                       an engine takes no weights at present; it was not touched
├── PublishFailed                the background part of an earlier `publish` failed
├── BroadcasterDied              the broadcaster's process is gone, or does not answer
└── DeadlineExceeded             a wait of a swap or of a publish took too long
"""

from typing import ClassVar


class WeightSyncError(Exception):
    """Root of every error that leaves this package."""

    exit_code: ClassVar[int] = 1


class InputError(WeightSyncError, ValueError):
    """A setting that cannot be used; says what would be."""

    exit_code: ClassVar[int] = 2


class ManifestError(WeightSyncError):
    """A manifest, or the list of tensors it is planned from, contradicts itself."""


class IncompatibleWeights(WeightSyncError):
    """Tensors that are not the ones the engine serves; the engine was not touched."""


class VersionOrderError(WeightSyncError):
    """A policy version that does not follow the last one."""


class StagingError(WeightSyncError):
    """A bucket could not be opened or verified; the engine was not touched."""


class WrongBase(StagingError):
    """A delta that does not apply to the weights at hand; the engine was not touched."""


class LoadFailed(WeightSyncError):
    """The engine refused weights half-way; it must not go on before a full load succeeds."""


class NotNow(WeightSyncError):
    """An engine that takes no weights at present; this call has not touched it."""


class PublishFailed(WeightSyncError):
    """A version could not be stored or announced after `publish` had returned."""


class BroadcasterDied(WeightSyncError):
    """Nobody announces versions or grants permits any more."""


class DeadlineExceeded(WeightSyncError, TimeoutError):
    """A step took longer than its deadline; says which one, for whom and how long."""
