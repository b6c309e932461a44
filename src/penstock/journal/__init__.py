"""The store's only write-ahead log: one record for every flush, one fsync for every table.

    record      the body of a record: groups of writes, each with a section for every partition it writes to
    partitions  numbers of partitions (a partition is one shard of one table), and the shard of a key
    consensus   the protocol that makes a record durable; `Alone` is an fsync here, `replica` has the quorum
    tracker     which records partitions and members still need, and so which segments can be deleted

docs/format/journal.md gives the bytes.
"""
