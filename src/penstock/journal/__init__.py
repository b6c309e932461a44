"""The store's only write-ahead log: one record for every flush, one fsync for every table.

record      groups and sections to bytes and back
consensus   the seam: what makes a record durable (`alone`: an fsync here; replicated: a quorum)
tracker     which records are still needed, and by whom
"""
