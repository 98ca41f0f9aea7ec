"""Errors of weight synchronisation."""

from typing import ClassVar


class WeightSyncError(Exception):
    """Base class of all errors that this package raises."""

    exit_code: ClassVar[int] = 1


class InputError(WeightSyncError, ValueError):
    """A setting of the user cannot be used."""

    exit_code: ClassVar[int] = 2


class ManifestError(WeightSyncError):
    """A manifest, or the list of tensors it is planned from, is inconsistent or unreadable."""


class IncompatibleWeights(WeightSyncError):
    """The names, shapes or dtypes of the tensors differ from those of the engine."""


class VersionOrderError(WeightSyncError):
    """A policy version is not newer than the previous one."""


class StagingError(WeightSyncError):
    """A bucket is missing, damaged or unsealed; the engine was not touched."""


class WrongBase(StagingError):
    """A delta was made for a different base version; the engine was not touched."""


class LoadFailed(WeightSyncError):
    """Loading failed half-way; the engine must not generate before a full load succeeds."""


class UpdateRefused(WeightSyncError):
    """An engine accepts no update now; this call has not changed it."""


class PublishFailed(WeightSyncError):
    """A version could not be stored or announced after `publish` had returned."""


class BroadcasterDied(WeightSyncError):
    """The broadcaster's process is gone or does not answer."""


class DeadlineExceeded(WeightSyncError, TimeoutError):
    """A step of an update or of a publication took longer than its deadline."""
