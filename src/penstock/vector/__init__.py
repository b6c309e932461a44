"""Vectors: float32 vectors with attributes by external id, and the search for the nearest of them.

options     the options of a table
section     pending writes of a shard, and their encoding; commands that change the index
attributes  the rules of attributes, and their columns for filters; `filters`: conditions on them
rows        vectors and Arrow rows that a caller passes
keys        the keys of rows; `operators`: how sets of internal ids are merged
machine     the state machine of a shard; `draft`: the edit of one record; `stored`: what its rows hold
live        the search kernel of a shard in memory, kept up to date; `loaded`: one kernel; `index`, `filtered`, `lists`,
            `exact`: how it searches; `removed`: what it hides; `stored_lists`: without it; `columns`: cached records;
            `sampling`: recall
reading     a snapshot of a shard; `pieces`: its pieces for readers in other processes
searching   queries: search, count, statistics
training    centroids: k-means, which lists to split and merge; `indexing`: the jobs that do it
service     searches of one vector, without a snapshot
table       the API; `reader`: what a snapshot has of it
kind        all of it, for the registry
"""
