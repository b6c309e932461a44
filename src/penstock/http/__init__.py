"""The HTTP door of a store: Prometheus' API, and what other programs send, as columns of samples.

samples         samples of series, as columns, for `SeriesTable.write_arrow`
remote_write    Prometheus remote write 1.0 and 2.0
line_protocol   InfluxDB's line protocol
otlp            OpenTelemetry's metrics and logs

prometheus_api  queries, series, labels and metadata of a table, as JSON
application     requests: who may send them, how large they are, and what answers them
incoming        how requests are refused and bodies read
serving         the socket and the thread

console            pages in a browser: routes, rights, actions; console_files: the pages themselves
console_sampling   samples of a store, once a second for all pages
console_reading    what screens read of tables
sessions           a cookie that stands for a token

Bodies come from strangers: every size is checked before anything is decompressed or decoded, and what is malformed is
`Invalid` in one line.

Thread: see each module.
"""
