"""Time series: samples of float64 at microsecond times, found by labels.

labels      label sets: their rules, their fingerprint, tables of many of them
selectors   Prometheus selectors and their matchers
options     the options of a table
section     pending writes of a shard, and their encoding
"""
