"""The control plane: tables, progress, files, jobs, metrics and generations, in one LMDB file.

Other processes never open the file: they ask its owner.

A commit, from the API to the bytes:

    manifest     the API: typed reads, and transactions of operations
    operations   the operations of a commit, as values: put a table, raise progress, add a chunk, change a job, ...
    writer       the one writer: requests of all threads, several in one LMDB transaction
    edit         applies operations inside a transaction
    draft        their changes in Python, written to LMDB together at the end
    invariants   rules between rows, checked at each commit, and all of them for damaged files
    residency    rules for where a file may go: local, archived, evicted
    waiters      threads that wait until a component's counter of commits (its generation) reaches a number
    tables       the LMDB tables: the key type and the record type of each
    keys         the types of keys, and their bytes
    records      the types of records
    codec        the bytes of a record, and its checksum
    engine       the protocol of the transactional key-value store below
    environment  the engine on LMDB
    memory       the tables in memory: a store that is opened read-only, and tests, use them instead of LMDB

Opening:

    examine      decides whether a file may be mapped: by the checksums of its clean close, or by reading every page
    page_sums    compares each page with its checksum before LMDB follows it
    pages        reads the pages of an LMDB file without LMDB
    migrations   upgrades records of older versions
    recovery     the steps from an open manifest to the state of a store
    fork         refuses objects that were opened before a fork
    settings     limits and times

Jobs:

    jobs         durable jobs: enqueue, lease, complete, retry, repair; at most one of a table and kind runs

docs/format/manifest.md gives the bytes.
"""
