"""Keys in order, bytes to bytes.

section   the writes of a flush to one shard: gathered in a dict, encoded as columns, folded into one edit
machine   a shard: a tree
pieces    a shard at one moment, and its parts for readers elsewhere
loading   rows prepared outside the owner, for a bulk load
kind      how all this plugs into a store
values    what a table's values are: bytes, text, JSON, numbers
table     the API
"""
