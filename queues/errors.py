"""The errors of `queues`, with the exit codes of commands that end with them."""


class QueuesError(Exception):
    """Root of the package's errors."""

    exit_code = 1


class InputError(QueuesError, ValueError):
    """A setting or an argument is outside what is allowed."""

    exit_code = 2


class QueueClosed(QueuesError):
    """No more work will come: the run is over, or the broker was closed."""


class ProtocolError(QueuesError):
    """A call that the protocol between broker, workers and learner does not allow now."""


class SchemaError(QueuesError, ValueError):
    """A record or payload breaks the schema; the message starts with the field's name."""


class JournalError(QueuesError):
    """A frame of the journal is missing, truncated or damaged."""


class LedgerError(QueuesError):
    """The ledger cannot be opened, read or written."""


class AccountingError(LedgerError):
    """The states of the groups do not add up; the run must not go on."""


class BrokerLostError(QueuesError):
    """The broker's process died, cannot be reached or does not answer in time."""
