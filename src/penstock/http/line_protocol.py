r"""InfluxDB's line protocol: `measurement,tag=value field=1.5,other=2i,text="x" 1700000000000000000`.

A field becomes the metric `measurement_field`, or `measurement` if the field is called `value`; tags are labels.
Numbers, unsigned and signed integers and booleans are samples; texts are counted and left out. `\` escapes a comma, a
space, an equals sign and, in a text, a quote.

Thread: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.http.samples import ReceivedSamples, SampleCollector
from penstock.series.labels import LABELS_MAX, METRIC
from penstock.series.options import TIME_MAX, TIME_MIN

BODY_BYTES_MAX = 32 << 20
FIELDS_MAX = 1_024  # of one line
LINES_UNCHECKED = 256  # decoded between two readings of the clock
PRECISIONS_NS = {"ns": 1, "n": 1, "us": 1_000, "u": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
# A comment; or measurement and tags, then fields. Nothing is tried twice: a part may have megabytes.
_LINE = re.compile(
    r"""[^\S\n]*+\#[^\n]*+
    |[ ]*+(?:[^\\\ \n]++|\\.)*+(?:[^\\=\n]++|\\.|="(?:[^"\\]++|\\.)*+"|=|\\$)*+""",
    re.DOTALL | re.VERBOSE,
)
_PART = re.compile(r"(?:[^\\,= ]++|\\.|\\$)++", re.DOTALL)  # a measurement, a key or the value of a tag
_MEASUREMENT = re.compile(r"(?:[^\\, ]++|\\.|\\$)++", re.DOTALL)
_FIELD_VALUE = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^, ]+', re.DOTALL)
_ESCAPED = re.compile(r"\\([,= ])")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"(-?[0-9]{1,20})[iu]")
_TIME = re.compile(r"-?[0-9]{1,19}")
_TRUE, _FALSE = ("t", "T", "true", "True", "TRUE"), ("f", "F", "false", "False", "FALSE")


def decode_lines(
    body: bytes, now_us: int, precision: str = "ns", check: Callable[[], None] = lambda: None
) -> ReceivedSamples:
    """Decode lines; those without a time are of `now_us`. `Invalid` names the first line that is malformed.

    `check` is called now and then, and may raise to end it.
    """
    if len(body) > BODY_BYTES_MAX:
        raise Invalid(f"the body has {len(body)} bytes: at most {BODY_BYTES_MAX} are allowed")
    unit_ns = PRECISIONS_NS.get(precision)
    if unit_ns is None:
        raise Invalid(f"a precision is one of {', '.join(PRECISIONS_NS)}, not {in_short(precision)}")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    collector = SampleCollector()
    for number, line in enumerate(_lines(text), 1):
        if not number % LINES_UNCHECKED:
            check()
        if line and not line.isspace() and not line.lstrip().startswith("#"):
            try:
                _LineReader(line.strip(" \r")).into(collector, now_us, unit_ns)
            except ValueError as error:
                raise Invalid(f"line {number} is not line protocol: {error}") from None
    return collector.result()


def _lines(text: str) -> Iterator[str]:
    """Yield lines; only the text of a field may go on over a line's end: a quote elsewhere is a character."""
    at = 0
    while at <= len(text):
        line = _LINE.match(text, at)
        assert line is not None  # it matches the empty text, too
        yield line.group()
        at = line.end() + 1


class _LineReader:
    """Reads one line from left to right; `ValueError` says what is wrong."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._at = 0

    def into(self, collector: SampleCollector, now_us: int, unit_ns: int) -> None:
        measurement = self._take(_MEASUREMENT, "a measurement")
        labels: dict[str, str] = {}
        while self._skip(","):
            key = self._take(_PART, "the key of a tag")
            self._need("=")
            if len(labels) >= LABELS_MAX or key in labels or key == METRIC:
                raise ValueError(f"it has more than {LABELS_MAX} tags, one of them twice, or {METRIC}")
            labels[key] = self._take(_PART, "the value of a tag")
        self._need(" ")
        fields = self._fields()
        time_us = now_us
        if self._skip(" "):
            time_us = self._time(unit_ns)
        for key, value in fields:
            if value is None:
                collector.left_out += 1
            else:
                metric = measurement if key == "value" else f"{measurement}_{key}"
                collector.add({**labels, METRIC: metric}, time_us, value)

    def _fields(self) -> list[tuple[str, float | None]]:
        fields: list[tuple[str, float | None]] = []
        while True:
            key = self._take(_PART, "the key of a field")
            self._need("=")
            value = _FIELD_VALUE.match(self._line, self._at)
            if value is None:
                raise ValueError(f"the value of a field is expected at character {self._at + 1}")
            self._at = value.end()
            fields.append((key, _field_value(value.group())))
            if len(fields) > FIELDS_MAX:
                raise ValueError(f"it has more than {FIELDS_MAX} fields")
            if not self._skip(","):
                return fields

    def _time(self, unit_ns: int) -> int:
        text = self._line[self._at :].strip()
        if not _TIME.fullmatch(text):
            raise ValueError(f"{in_short(text)} is not a time")
        time_us = int(text) * unit_ns // 1_000
        if not TIME_MIN <= time_us < TIME_MAX:
            raise ValueError(f"the time {text} is outside the years 1 to 9999: is the precision right?")
        return time_us

    def _take(self, pattern: re.Pattern[str], name: str) -> str:
        part = pattern.match(self._line, self._at)
        if part is None:
            raise ValueError(f"{name} is expected at character {self._at + 1}")
        self._at = part.end()
        return _ESCAPED.sub(r"\1", part.group())

    def _skip(self, character: str) -> bool:
        if self._line[self._at : self._at + 1] != character:
            return False
        while self._line[self._at : self._at + 1] == character:
            self._at += 1
            if character != " ":
                break
        return True

    def _need(self, character: str) -> None:
        if not self._skip(character):
            raise ValueError(f"{character!r} is expected at character {self._at + 1}")


def _field_value(text: str) -> float | None:
    """Return a number; None for a text."""
    if text.startswith('"'):
        if len(text) < 2 or not text.endswith('"'):
            raise ValueError("a text has no closing quote")
        return None
    if text in _TRUE or text in _FALSE:
        return float(text in _TRUE)
    integer = _INTEGER.fullmatch(text)
    if integer is not None:
        return float(int(integer.group(1)))
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{in_short(text)} is not a number, a boolean or a quoted text")
    return float(text)
