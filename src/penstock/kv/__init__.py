"""The kind `kv`: an ordered map of bytes to values.

The API:

    table       reads and writes of a table; a put begins here
    mapping     the table as a Python mapping
    text_keys   tables whose keys are text
    values      the types of values, and their bytes: bytes, text, JSON, numbers
    structs     values that are Arrow structs
    frames      rows of Arrow tables and data frames, for `put_many`
    conditions  compare and set: the condition on a row's LSN

A write to a shard:

    section     its pending writes: collected in a dict, encoded as columns, folded into one edit of the tree
    validation  checks of what other processes send: sections, files, options
    machine     its state machine: applies sections to an LSM tree
    changes     what a record changed, for the change feed
    loading     rows prepared outside the owner, for a bulk load

A read that is not a get:

    pieces      a snapshot of a shard, and its pieces for readers in other processes
    ranges      key ranges from options and filters
    queries     how many keys, files and bytes

For the registry:

    kind        all of the above as a kind of table
"""
