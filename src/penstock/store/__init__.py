"""A store: a folder that one process owns.

`store.py` is what users hold; `tables.py` and `batch.py` are the part of it that a connected process has too.
`port.py` is the one way from there to everything below: a write goes from it to the coordinator, from that to
`flusher.py`, and so into the journal and the partitions. `governor.py` keeps memory within its limit, `space.py` and
`reserve.py` see to a disk that gets full, `dropped.py` removes the files of dropped tables, `identity.py` says which
store this is.
"""
