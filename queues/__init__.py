"""The queues between actors and learner: bounded staleness, durable delivery, exact accounts.

Names are loaded when they are first used, so that `import queues.config` costs neither Arrow nor
Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from queues.broker.broker import Broker
    from queues.broker.status import BrokerStatus
    from queues.config import QueuesConfig
    from queues.errors import (
        AccountingError,
        BrokerLostError,
        InputError,
        JournalError,
        LedgerError,
        ProtocolError,
        QueueClosed,
        QueuesError,
        SchemaError,
    )
    from queues.protocols import BatchQueue, PromptFeed, WorkQueue
    from queues.ray_broker import BrokerClient, create_broker
    from queues.readers.accounting import (
        Accounting,
        export_parquet,
        is_open,
        newest_checkpoint,
        read_accounting,
    )
    from queues.records import (
        Batch,
        BatchRecord,
        Evaluation,
        FinishReason,
        Lease,
        Prompt,
        Purpose,
        PutStatus,
        Rollout,
        RolloutGroup,
    )
    from queues.schema import decode, encode

__all__ = [
    "Accounting",
    "AccountingError",
    "Batch",
    "BatchQueue",
    "BatchRecord",
    "Broker",
    "BrokerClient",
    "BrokerLostError",
    "BrokerStatus",
    "Evaluation",
    "FinishReason",
    "InputError",
    "JournalError",
    "Lease",
    "LedgerError",
    "Prompt",
    "PromptFeed",
    "ProtocolError",
    "Purpose",
    "PutStatus",
    "QueueClosed",
    "QueuesConfig",
    "QueuesError",
    "Rollout",
    "RolloutGroup",
    "SchemaError",
    "WorkQueue",
    "create_broker",
    "decode",
    "encode",
    "export_parquet",
    "is_open",
    "newest_checkpoint",
    "read_accounting",
]

_MODULES = {
    "readers.accounting": (
        "Accounting",
        "export_parquet",
        "is_open",
        "newest_checkpoint",
        "read_accounting",
    ),
    "broker.broker": ("Broker",),
    "config": ("QueuesConfig",),
    "errors": (
        "AccountingError",
        "BrokerLostError",
        "InputError",
        "JournalError",
        "LedgerError",
        "ProtocolError",
        "QueueClosed",
        "QueuesError",
        "SchemaError",
    ),
    "protocols": ("BatchQueue", "PromptFeed", "WorkQueue"),
    "ray_broker": ("BrokerClient", "create_broker"),
    "records": (
        "Batch",
        "BatchRecord",
        "Evaluation",
        "FinishReason",
        "Lease",
        "Prompt",
        "Purpose",
        "PutStatus",
        "Rollout",
        "RolloutGroup",
    ),
    "schema": ("decode", "encode"),
    "broker.status": ("BrokerStatus",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
