"""The server: what an owner does for other processes.

Becoming the owner:

    opening            `penstock.open`: opens a store, and serves it
    __main__           the program of an owner that a client started; it ends when no client needs it
    healing            recovers a store after a failed write, for owners without a program of their own
    metrics_endpoint   `GET /metrics` over HTTP, for Prometheus

A request, on its way in:

    service            everything that serves one store, started when it is first needed
    control_socket     the local socket on which clients ask for Arrow Flight, or ask the owner to give up the store
    tcp                `penstock.serve_tcp`: serves over the network, with TLS and tokens
    guard              the proxy before gRPC on the network: ends TLS and relays
    frames             checks the HTTP/2 frames of a connection against limits
    callers            limits on the number and bytes of connections, with and without a token
    flight             Arrow Flight: passes requests to the gateway
    rights             tokens, and what each client may do
    work               admission of requests: how many, and how much memory, by client
    gateway            answers each request, over the owner's own port

What the gateway leaves to others:

    writes             groups from clients: checks all, then submits them in order
    scans              scans and queries that are read page by page
    leased_objects     snapshots and scans that clients have open, each with a lease
    query_names        names of queries of Spark, so that a query gets one snapshot only
    planning           where to split a table for tasks of Spark; the state of the tables of a batch
    confirming         linearizable reads: a quorum confirms that this member leads
    table_requests     describe, configure and drain tables
    status_requests    metrics, statistics, jobs, files
    archive_requests   the archive
    offer_requests     work for Spark drivers

A member of a cluster:

    member             runs the journal, and opens a store on it for each role: leader or follower
    member_files       files that members read from each other
    installing         replaces a member's store by a snapshot of the leader's

Without an open store:

    backups            `penstock.restore`, `check_backup`, `salvage`, `restore_manifest`
    reattaching        `penstock.reattach`: a store from its archive
"""
