"""The persistent queue: messages in data files, and a manifest that lists the valid files.

    qmft        the dual-slot manifest
    messages    batches of messages as columns
    files       a data file: opening record, messages, index records
    tail        the scan of an active file after an unclean end
    chain       the sequence of data files: appending, rolling, repair, removal
    reading     reads next to the writer
    persistent  the queue: append, sync, read, trim, recover
    dump        prints a queue's folder for people

In a store it is a kind of table:

    section     pending writes, as encoded in the journal
    machine     the state machine of a shard, over a persistent queue; its snapshots
    staged      messages in files that another process built
    positions   consumers' positions: rows of the ledger, and conditions on them
    leases      which consumer holds which message, in the owner's memory
    delivery    messages for consumers: leases, waiting, dead letters
    service     the owner's other calls: append, positions, retention
    retention, options, validation
    view, table, consumer, kind   the API; view: what a snapshot has of it

docs/format/qmft.md gives the bytes of files, docs/format/journal.md those of sections and rows.
"""

from penstock.queue.chain import QueueRepair, QueueSettings
from penstock.queue.messages import MessageBatch, Messages
from penstock.queue.persistent import PersistentQueue, QueueStatistics
from penstock.queue.qmft import ActiveFileState, FileEntry, FileTable, QmftManifest, QmftWriter

__all__ = [
    "ActiveFileState",
    "FileEntry",
    "FileTable",
    "MessageBatch",
    "Messages",
    "PersistentQueue",
    "QmftManifest",
    "QmftWriter",
    "QueueRepair",
    "QueueSettings",
    "QueueStatistics",
]
