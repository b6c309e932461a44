"""The kind `vector`: float32 vectors with attributes by external id, and the search for the nearest of them.

A shard is an LSM tree. Each vector gets an internal id; an index puts it into the posting list of its nearest centroid.

What a caller passes:

    table         the API for writing; an upsert begins here
    reader        the API for reading, live or in a snapshot
    options       the options of a table: dimensions, metric
    rows          vectors and Arrow rows that are passed, checked
    attributes    the rules of attributes, their bytes, and their columns for filters
    filters       conditions on attributes

A write to a shard:

    section       pending writes and changes of the index, and their bytes
    machine       the state machine: applies sections to the tree, then to the index in memory
    draft         the edit of one record; assigns internal ids
    keys          the keys of rows
    stored        the values of rows
    operators     how sets of internal ids are merged
    changes       what a record changed, for the change feed

A search:

    searching     the queries: search, count, statistics
    service       a search of one vector, without a snapshot; tunes how many lists a search looks at
    reading       a snapshot of a shard
    live          the index of a shard in memory, loaded when needed and kept up to date
    loaded        one such index, and what a snapshot sees of it
    index         the vectors in memory, searched exactly or by lists
    lists         posting lists in memory, by faiss
    exact         the nearest rows of a matrix, by numpy
    removed       the ids that an index in memory hides, for the present and for open snapshots
    filtered      a search under a filter: the few vectors or lists that it needs
    stored_lists  posting lists searched in the tree, while no index is in memory
    columns       cached ids and attributes
    sampling      a sample of queries, to measure recall
    pieces        a shard as pieces, which other processes read and search from its files

In the background:

    training      centroids: k-means, which lists to split and merge, how many to search
    indexing      the jobs that build the index of a table, step by step

For the registry:

    kind          all of the above as a kind of table

docs/format/vector.md gives the bytes.
"""
