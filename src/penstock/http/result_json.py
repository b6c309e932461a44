"""The result of a query in Prometheus' shape, as JSON. The points of all series are written by Arrow, as columns.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Invalid
from penstock.promql import QueryResult
from penstock.promql.values import F64, I64

LABEL_CHARACTERS_MAX = 256 << 20  # of one answer to a query
POINTS_MAX = 2_000_000  # of one answer to a query: each takes some 200 bytes until it is sent


def result_json(result: QueryResult) -> dict[str, Any]:
    """Return the result of a query in Prometheus' shape; `Invalid` if it is too large."""
    samples = result.samples
    if len(samples.values) > POINTS_MAX:
        raise Invalid(f"an answer has at most {POINTS_MAX} points, not {len(samples.values)}: give a longer step")
    characters = int(samples.labels.characters().sum())
    if characters > LABEL_CHARACTERS_MAX:
        raise Invalid(f"an answer has at most {LABEL_CHARACTERS_MAX} characters of labels: select fewer series")
    if result.kind == "string":
        return {"resultType": "string", "result": [0, result.text]}
    if result.kind == "scalar":
        return {"resultType": "scalar", "result": _instants(samples.times, samples.values)[0]}
    rows = np.flatnonzero(np.diff(samples.starts))
    labels = samples.labels.take(rows).label_sets()
    if result.kind == "vector":  # one point each, all at the same time
        instants = _instants(samples.times, samples.values)
        entries = [{"metric": metric, "value": point} for metric, point in zip(labels, instants, strict=True)]
    else:
        points = _points(samples.times, samples.values)
        borders = pa.array(np.append(samples.starts[rows], len(samples.values)), pa.int32())
        joined = pc.binary_join(pa.ListArray.from_arrays(borders, points), b",").to_pylist()
        entries = [
            {"metric": metric, "values": msgspec.Raw(b"[%b]" % text)}
            for metric, text in zip(labels, joined, strict=True)
        ]
    return {"resultType": result.kind, "result": entries}


def _instants(times_us: I64, values: F64) -> list[msgspec.Raw]:
    """Return the points of an instant, which has one time."""
    head = _seconds(int(times_us[0])).encode() if len(times_us) else b""
    return [msgspec.Raw(b'[%b,"%b"]' % (head, text)) for text in value_texts(values).to_pylist()]


def _points(times_us: I64, values: F64) -> Any:
    """Return `[seconds, "value"]` for each point, as a column of bytes."""
    coded = pa.array(times_us).dictionary_encode()  # steps: few of them, for many series
    heads = pa.array([f'[{_seconds(time_us)},"'.encode() for time_us in coded.dictionary.to_pylist()], pa.binary())
    return pc.binary_join_element_wise(heads.take(coded.indices), value_texts(values), b'"]', b"")


def _seconds(time_us: int) -> str:
    return repr(time_us / 1e6).removesuffix(".0")


def value_texts(values: F64) -> Any:
    """Return numbers as Prometheus writes them: as few digits as tell them apart, NaN, +Inf and -Inf; as bytes."""
    texts = pa.array(values, from_pandas=False).cast(pa.string()).cast(pa.binary())
    odd = ~np.isfinite(values)
    if odd.any():
        names = np.select([np.isnan(values[odd]), values[odd] > 0], [b"NaN", b"+Inf"], b"-Inf").tolist()
        texts = pc.replace_with_mask(texts, pa.array(odd), pa.array(names, pa.binary()))
    return texts
