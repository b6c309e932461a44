"""The persistent queue: messages in files, and a manifest that says which files count.

    qmft        the dual-slot manifest
    messages    batches of messages as columns
    files       one data file: opening record, messages, index records
    tail        the scan of an active file after an unclean end
    chain       which file grows, how another follows it, what a crash left
    reading     what readers see, and how they find it
    persistent  the queue: append, sync, read, trim, recover
    dump        a look into a queue's folder, for people

In a store it is a kind of table:

    section     writes on their way, as they stand in the journal
    machine     a shard: a persistent queue that is fed by sections; its snapshots
    staged      messages in files that were built elsewhere
    positions   how far consumers are: rows of the ledger, and conditions over them
    leases      who has which message, in the owner's memory
    delivery    messages for consumers: leases, waiting, dead letters
    service     what else the owner does: numbers, places, retention
    retention, options, received
    table, consumer, kind   the API

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
