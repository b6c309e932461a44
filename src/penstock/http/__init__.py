"""The HTTP server of a store: Prometheus' API, data that other programs send, and the console.

A request:

    serving           the socket and the thread
    tls_listener      TLS connections: a bounded number of handshakes at a time
    application       routes, tokens, sizes of bodies, and what answers each request
    incoming          how requests are refused and bodies read

Data that other programs send:

    remote_write      Prometheus remote write 1.0 and 2.0
    otlp              OpenTelemetry's metrics and logs
    line_protocol     InfluxDB's line protocol
    wire_format       the fields of protobuf messages, read in place
    samples           received samples as columns, for a series table

Queries:

    prometheus_api    queries, series, labels and metadata of a table, as JSON
    result_json       the result of a query as JSON
    query_json        the tree of a query as JSON

The console, pages in a browser (their files are in `console_files`):

    console           routes, rights, actions
    sessions          a cookie that stands for a token
    console_sampling  samples of a store, once a second for all pages
    console_reading   what screens read of tables

Bodies come from strangers: every size is checked before anything is decompressed or decoded, and what is malformed is
`Invalid` in one line.

Thread: see each module.
"""
