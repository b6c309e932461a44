"""The persistent queue: messages in files, and a manifest that says which files count.

    qmft        the dual-slot manifest
    messages    batches of messages as columns
    files       one data file: opening record, messages, index records
    tail        the scan of an active file after an unclean end
    chain       which file grows, how another follows it, what a crash left
    reading     what readers see, and how they find it
    persistent  the queue: append, sync, read, trim, recover
    dump        a look into a queue's folder, for people

docs/format/qmft.md gives the bytes.
"""

from penstock.queue.chain import QueueRepair, QueueSettings
from penstock.queue.messages import Batch, Messages
from penstock.queue.persistent import PersistentQueue, QueueStatistics
from penstock.queue.qmft import ActiveFileState, FileEntry, FileTable, Manifest, ManifestWriter

__all__ = [
    "ActiveFileState",
    "Batch",
    "FileEntry",
    "FileTable",
    "Manifest",
    "ManifestWriter",
    "Messages",
    "PersistentQueue",
    "QueueRepair",
    "QueueSettings",
    "QueueStatistics",
]
