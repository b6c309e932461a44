"""The path of a durable record: the ledger accepts or refuses each of its groups, then every partition applies its
sections. A partition is one shard of one table; a section is what a group of writes holds for one partition.

Before the journal:

    admission        whether a partition takes a write: it slows, delays or refuses writers of one that is behind
    pending          writes that are not in the journal yet, as groups of sections
    part_log         a section that is a list of parts, for kinds whose writes are not plain rows
    part_codec       its bytes
    reference        sections that name files built outside the store, and the life of such a file
    storage_options  the options of tables of every kind: folders, compression, encryption, archive, retention

The record is durable:

    dispatcher       sends each record to the ledger, then each section to its partition
    ledger           decides: conditions, tokens, create and drop; keeps one verdict for each group
    ledger_records   what the ledger stores: tables, conditions, operations, verdicts
    tokens           which numbers of a producer were used, so that a repeated batch counts once

A section is applied:

    roster           the open partitions, each opened on first use
    partition        one open partition: its state machine, its own log, how far it is
    machine          the protocol of a state machine, which each kind of table implements
    backlog          sections that wait because applying them touches files, or failed; retries and limits
    workers          the threads that apply them
    aside            sections that cannot be applied because of a bug, stored with their error and skipped

A read:

    moments          reads several partitions at one LSN, and waits for those that are late
    marker           one reader that waits until a partition has reached an LSN

The journal is truncated, a partition repaired:

    checkpoint       decides which journal segments can be deleted, and deletes them
    spill            a partition's own log, for sections whose journal segment is to be deleted
    extent           the range of the journal, recorded in the manifest, so that a missing end is noticed
    snapshots        copies of a partition's files at one LSN: to repair it, or to install it elsewhere
    snapshot_folder  the files of such a copy
"""
