"""Time series: samples of float64 at microsecond times, found by labels.

labels      label sets: their rules, their fingerprint, tables of many of them
selectors   Prometheus selectors and their matchers
options     the options of a table
section     pending writes of a shard, and their encoding
arrow       Arrow rows that are written or read
table       the API
admission   limits that the owner holds before a write; `admitted`: series that wait to be applied
queries     reads by selector; `aggregate`: sums, rates, quantiles by step
shard       what queries and admission ask of a shard
machine     the state machine of a shard; `drafts`: the edit of a record, with new ids; `ids`: those that are remembered
reading     a snapshot of a shard; `index`: matchers to ids
memtable    applied samples as columns; `blocks`: samples in files; `operators`: how both are merged
keys        the keys of rows; `times`: times as keys, for readers that share a scan
service     retention
kind        all of it, for the registry
"""
