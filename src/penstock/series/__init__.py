"""The kind `series`: samples of float64 at microsecond times, found by labels.

A shard is an LSM tree. Time is divided into buckets; in each bucket a series has a number, its id.

What a caller passes:

    table          the API for writing; a sample begins here
    reader         the API for reading: samples, labels, aggregates, PromQL
    options        the options of a table
    labels         label sets: their rules, their fingerprint, tables of many of them
    selectors      Prometheus selectors and their matchers
    times          times that users pass; times as keys, for readers that share a scan
    columns        values and times that are passed as numbers, lists and arrays
    arrow          Arrow rows that are written or read

A write to a shard:

    admission      limits on times and on new series, checked by the owner before the journal
    admitted       series that were admitted and are not applied yet
    section        pending writes, in order
    section_codec  their bytes
    rules          what a section may hold; checks those from other processes
    bounded_zstd   compression that cannot expand to much memory
    loading        rows prepared outside the owner, for a bulk load
    machine        the state machine: applies sections to the tree
    drafts         the edit of one record; assigns ids to new series
    ids            the ids that a shard remembers
    changes        what a record changed, for the change feed

Its rows:

    keys           the keys of rows
    samples        samples and deletes of samples, as columns: sort, delete, unite
    memtable       applied samples as columns, in no file yet
    slices         which row of the tree a sample belongs to; divides rows that grow too large
    blocks         the samples of a group of series, compressed, as in files
    operators      how blocks, and sets of ids, are merged

A read:

    queries        queries by selector, and their answers as Arrow batches
    aggregate      sums, rates and quantiles by step of time
    promql_source  PromQL over a table
    shard          protocols of a shard, for queries and for admission
    reading        a snapshot of a shard
    index          matchers to ids, ids to labels
    block_cache    recently read blocks
    pieces         ranges of time as pieces, for readers in other processes

In the background:

    service        retention: deletes old buckets
    rollups        tables with count, sum, min, max and last by step, computed from another table by jobs

For the registry:

    kind           all of the above as a kind of table

docs/format/series.md gives the bytes.
"""
