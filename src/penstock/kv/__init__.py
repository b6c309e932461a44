"""The kind `kv`: an ordered map of bytes to values.

section   pending writes to one shard: collected in a dict, encoded as columns, folded into one edit
machine   the state machine of a shard, over an LSM tree
pieces    a snapshot of a shard, and its pieces for readers in other processes
loading   rows prepared outside the owner, for a bulk load
kind      the kind itself, as a store uses it
structs   values that are Arrow structs
values    the types of values: bytes, text, JSON, numbers
conditions  compare and set: the condition on a row
queries   how many keys, files and bytes
frames    Arrow rows for `put_many`
table     the API; mapping is its form as a MutableMapping, text_keys that of tables with keys of text
"""
