"""The path of a durable record: the ledger judges it, then every partition applies its sections.

machine     what a kind of table implements: the state machine of a partition
ledger      tokens, tables, verdicts; applied first
dispatcher  routing, limits, failing partitions, watermarks
spill       a partition's own log, for sections whose journal segment is to be deleted
checkpoint  decides which journal segments can be deleted, and deletes them
"""
