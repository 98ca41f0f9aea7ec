"""The errors of `queues`.

QueuesError                    exit code 1: failed at run time
├── InputError                 exit code 2: a user's setting or argument (also a ValueError)
├── QueueClosed                the run is over or the broker closed: the normal end of work
├── ProtocolError              a caller broke the order of calls, e.g. took a batch too early
├── SchemaError                a record or payload that the schema refuses (also a ValueError)
├── JournalError               a frame that cannot be read back
├── LedgerError                the ledger cannot be opened, read or written
│   └── AccountingError        a group is in no state, or in two
└── BrokerLostError            the process of the broker is gone, or it does not answer
"""


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
