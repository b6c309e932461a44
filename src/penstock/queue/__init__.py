"""The persistent queue: messages in data files, and a manifest that lists the valid files.

    persistent   the queue: append, sync, read, trim, recover
    chain        the sequence of data files: appending, rolling, repair, removal
    qmft         the queue's own manifest: two slots, written alternately
    files        a data file: opening record, messages, index records
    messages     batches of messages as columns
    headers      headers of messages: names with bytes, beside the payload
    coding       compressed and encrypted records
    tail         the scan of an active file after an unclean end
    reading      reads next to the writer
    dump         prints a queue's folder for people

In a store it is a kind of table. A message:

    table        the API for writing, positions and statistics
    view         the API for reading, live or in a snapshot
    options      the options of a queue: retention, headers, change feed
    section      pending messages of a shard, as encoded in the journal
    validation   checks of what other processes send: sections, conditions, calls, options
    machine      the state machine of a shard, over a persistent queue; its snapshots
    retention    which messages a retention deletes
    changes      the change feed, read from the files
    pieces       a snapshot of a shard as pieces, for readers in other processes
    staged       messages in files that another process built
    arrow_files  reads such a file, which may be malformed

A consumer:

    consumer     the API: takes messages under leases and acknowledges them
    calls        its requests to the owner, and the replies
    service      the owner's side: append, deliveries, positions, retention
    delivery     which messages a consumer gets: leases, waiting, dead letters
    leases       which consumer has leased which message, in the owner's memory
    positions    acknowledged messages and positions: rows of the ledger, and conditions on them

For the registry:

    kind         all of this as a kind of table

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
