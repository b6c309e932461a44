"""What happens to a record once it is durable: the ledger judges it, then every partition gets its part.

machine     what a kind of table must offer: the state machine of a partition
ledger      tokens, tables, verdicts; applied first
dispatcher  routing, limits, failing partitions, watermarks
spill       a partition's own log, for sections whose journal segment has to go
checkpoint  which journal segments may go, and making it so
"""
