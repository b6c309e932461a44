"""What other programs send over HTTP, as columns of samples: pure functions from the bytes of a body.

samples         samples of series, as columns, for `SeriesTable.write_arrow`
remote_write    Prometheus remote write 1.0 and 2.0
line_protocol   InfluxDB's line protocol
otlp            OpenTelemetry's metrics and logs

Bodies come from strangers: every size is checked before anything is decompressed or decoded, and what is malformed is
`Invalid` in one line.

Thread: pure functions.
"""
