"""Errors of weight synchronisation."""

from headway.errors import HeadwayError


class ManifestError(HeadwayError):
    """A manifest, or the list of tensors it is planned from, is inconsistent or unreadable."""


class IncompatibleWeights(HeadwayError):
    """The names, shapes or dtypes of the tensors differ from those of the engine."""


class VersionOrderError(HeadwayError):
    """A policy version is not newer than the previous one."""


class StagingError(HeadwayError):
    """A bucket is missing, damaged or unsealed; the engine was not touched."""


class WrongBase(StagingError):
    """A delta was made for a different base version; the engine was not touched."""


class LoadFailed(HeadwayError):
    """Loading failed half-way; the engine must not generate before a full load succeeds."""


class UpdateRefused(HeadwayError):
    """An engine accepts no update now; this call has not changed it."""


class PublishFailed(HeadwayError):
    """A version could not be stored or announced after `publish` had returned."""


class BroadcasterDied(HeadwayError):
    """The broadcaster's process is gone or does not answer."""


class DeadlineExceeded(HeadwayError, TimeoutError):
    """A step of an update or of a publication took longer than its deadline."""
