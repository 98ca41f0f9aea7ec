"""The errors of `queues`."""

from headway.errors import HeadwayError


class QueueClosed(HeadwayError):
    """No more work will come: the run is over, or the broker was closed."""


class ProtocolError(HeadwayError):
    """A call that the protocol between broker, workers and learner does not allow now."""


class SchemaError(HeadwayError, ValueError):
    """A record or payload breaks the schema; the message starts with the field's name."""


class JournalError(HeadwayError):
    """A frame of the journal is missing, truncated or damaged."""


class LedgerError(HeadwayError):
    """The ledger cannot be opened, read or written."""


class AccountingError(LedgerError):
    """The states of the groups do not add up; the run must not go on."""


class BrokerLostError(HeadwayError):
    """The broker's process died, cannot be reached or does not answer in time."""
