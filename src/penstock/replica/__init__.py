"""Replicas: Raft carries the journal. PySyncObj decides elections and commits; everything that must be durable is here.

A record on its way to a quorum:

    replicated    `Consensus` by quorum: writers propose and wait, a thread runs the member's loop
    proposal      records that wait for a quorum
    raft          one member: its loop, its messages, the leader's side
    following     the follower's side: appends the leader's entries, cuts those that conflict
    electing      who may be elected
    joining       how a member with a new disk becomes one that votes
    library       PySyncObj with guards against its known defects; the base class of `raft`, `electing` and `following`

What a member stores:

    raft_log      the journal as the log of Raft: entries with terms, the members' own entries beside the records
    state         a member's term, its vote and where its log begins, in one small file

Between members:

    seams         protocols of what Raft gets from outside: the connections, the files, the timeouts
    messages      what members send each other, as bytes
    tcp_link      the connections between members
    identity      their certificates
    resolving     looks up host names without delaying the loop
    file_channel  a connection of its own for files: snapshots, and files that records name

For the whole cluster:

    cluster_time  the leader's time, which followers use instead of their own wall clocks
    masters       which member is preferred for reads of a partition
"""
