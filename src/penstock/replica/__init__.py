"""Replicas: Raft carries the journal. PySyncObj decides elections and commits; everything that must be durable is here.

state       a member's term, its vote and where its log begins, in one small file
raft_log    the journal as the log of Raft: entries with terms, the members' own entries beside the records
messages    what members send each other, as bytes
identity    how members show who they are
tcp_link    the connections between members
seams       what Raft gets from outside: the link, files, times
library     PySyncObj with guards against its known defects
following   what a follower does with its leader's entries
joining     how a member with a new disk becomes one that votes
electing    who may be elected
proposal    records on their way to a quorum
raft        one member: its loop, messages, the leader's side
replicated  `Consensus` by quorum: the loop's thread, proposals, barriers
"""
