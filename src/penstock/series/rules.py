"""The rules for writes to a series table: for what its API is passed, and for sections that other processes send.

Thread: pure functions.
"""

from __future__ import annotations

import numpy as np

from penstock.arguments import in_short
from penstock.arguments import text as checked_text
from penstock.errors import Invalid
from penstock.partition.part_codec import receive_parts
from penstock.series.labels import check_table, check_value
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.samples import I64
from penstock.series.section import MetricMetadata, SampleBlock, SeriesDelete, SeriesSection
from penstock.series.section_codec import decode_section
from penstock.series.selectors import parse_selector

HELP_BYTES_MAX = 4_096
METRIC_TYPES = ("", "counter", "gauge", "histogram", "summary", "info", "stateset", "unknown")


def receive_section(payload: bytes) -> SeriesSection:
    """Decode and check a section; `Invalid` if it breaks a rule of the API."""
    section = receive_parts("series", decode_section, payload)
    for part in section.parts:
        if isinstance(part, SampleBlock):
            check_block(part)
        elif isinstance(part, MetricMetadata):
            check_metadata(part)
        elif isinstance(part, SeriesDelete):
            check_delete(part)
        else:
            raise Invalid("only the owner of a store deletes buckets and computes rollups: see SeriesOptions")
    return section


def check_block(block: SampleBlock) -> None:
    """Raise `Invalid` if a block breaks a rule."""
    check_table(block.series)
    if not len(block):
        raise Invalid("a block of a series table holds no samples")
    if int(block.index.max()) >= len(block.series):
        raise Invalid("a sample names a series that its block does not have")
    if len(np.unique(block.index)) != len(block.series):
        raise Invalid("a series of a block has no samples")
    check_times(block.times)


def check_times(times: I64) -> None:
    """Raise `Invalid` if a time is not one that a table can hold."""
    if len(times) and not (int(times.min()) >= TIME_MIN and int(times.max()) < TIME_MAX):
        wrong = int(times.min()) if int(times.min()) < TIME_MIN else int(times.max())
        raise Invalid(f"the time {wrong} is outside the years 1 to 9999: times are microseconds since 1970")


def check_metadata(metadata: MetricMetadata) -> MetricMetadata:
    """Return a metric's metadata as plain texts, which the writer can encode; `Invalid` if it breaks a rule."""
    metric = check_value("__name__", checked_text(metadata.metric, "a metric", HELP_BYTES_MAX))
    kind, unit, text = (_text_of(metadata, name) for name in ("type", "unit", "help"))
    if kind not in METRIC_TYPES:
        raise Invalid(f"{in_short(kind)} is not a type of metrics: use one of: {', '.join(METRIC_TYPES[1:])}")
    return MetricMetadata(metric, kind, unit, text)


def _text_of(metadata: MetricMetadata, name: str) -> str:
    value = getattr(metadata, name)
    if isinstance(value, str) and not str.__len__(value):
        return ""
    return checked_text(value, f"the {name} of a metric", HELP_BYTES_MAX)


def check_delete(delete: SeriesDelete) -> SeriesDelete:
    """Return a delete; `Invalid` if its selector or its range is wrong."""
    parse_selector(delete.selector)
    if not TIME_MIN <= delete.start < delete.end <= TIME_MAX:
        raise Invalid(f"a range of time runs upwards: {delete.end} is not above {delete.start}")
    return delete
