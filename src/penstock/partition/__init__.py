"""The path of a durable record: the ledger judges it, then every partition applies its sections.

machine     what a kind of table implements: the state machine of a partition
ledger      tokens, tables, verdicts; applied first
dispatcher  routing to partitions, opened on first use; snapshots
backlog     an open partition; entries that could not be applied, retries, limits
spill       a partition's own log, for sections whose journal segment is to be deleted
checkpoint  decides which journal segments can be deleted, and deletes them
"""
