"""Replicas: Raft carries the journal. PySyncObj decides elections and commits; everything that must be durable is here.

state       a member's term, its vote and where its log begins, in one small file
raft_log    the journal as the log of Raft: entries with terms, the members' own entries beside the records
messages    what members send each other, as bytes
identity    how members show who they are
tcp_link    the connections between members
raft        PySyncObj with guards against its known defects
replicated  `Consensus` by quorum: the loop's thread, proposals, barriers
"""
