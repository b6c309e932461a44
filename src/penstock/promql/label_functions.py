"""Functions of labels: label_replace, label_join, the order of series, and the labels that `absent` returns.

Thread: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cmp_to_key
from typing import Any

import numpy as np
import re2

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.promql.labels import LabelMatrix
from penstock.promql.matching import SAME_LABELS
from penstock.promql.tree import METRIC_NAME, LabelMatcher
from penstock.promql.values import I64, VectorValue, merged

PATTERN_BYTES_MAX = 4_096
VALUE_CHARACTERS_MAX = 65_536  # of a label that a function makes: calls within calls could double it each time
VALUES_CHARACTERS_MAX = 64 << 20  # of all its values
_GROUP = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})", re.ASCII)
_CHUNKS = re.compile(r"\d+|\D+", re.ASCII)
_DIGITS = "0123456789"
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.dot_nl = True


def matches(matcher: LabelMatcher, text: str) -> bool:
    """Return whether the value of a label fulfils a matcher; "" is that of an absent one."""
    if matcher.operator in ("=", "!="):
        return (text == matcher.value) == (matcher.operator == "=")
    return (_compiled(matcher.value).fullmatch(text) is not None) == (matcher.operator == "=~")


def check_label_name(name: str, function: str) -> None:
    """Refuse a name that a label cannot have."""
    if not name or "\0" in name:
        raise Invalid(f"{function} needs the name of a label, not {in_short(name)}")


def label_replace(vector: VectorValue, target: str, replacement: str, source: str, pattern: str) -> VectorValue:
    """Set a label from the groups of a regular expression that matches all of another label."""
    compiled = _compiled(pattern)
    check_label_name(target, "label_replace")
    values, codes = vector.labels.column(source)
    matches = [compiled.fullmatch(value) for value in values]
    old, old_codes = vector.labels.column(target)
    new = _bounded("" if match is None else _expanded(replacement, match, compiled) for match in matches)
    names = [*old, *new]
    hit = np.array([match is not None for match in matches])[codes]
    labels = vector.labels.replacing(target, names, np.where(hit, codes + len(old), old_codes))
    unnamed = vector.unnamed & ~hit if target == METRIC_NAME else vector.unnamed
    return merged(VectorValue(labels, vector.values, vector.present, unnamed), SAME_LABELS)


def _compiled(pattern: str) -> Any:
    if len(pattern.encode()) > PATTERN_BYTES_MAX:
        raise Invalid(f"a regular expression has at most {PATTERN_BYTES_MAX} bytes, not {len(pattern.encode())}")
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error:
        raise Invalid(f"{in_short(pattern)} in label_replace is not a regular expression of RE2") from None


def _expanded(template: str, match: Any, compiled: Any) -> str:
    """Return a template with `$1`, `${1}`, `$name` and `${name}` replaced; unknown groups are empty."""

    size = 0

    def group(reference: re.Match[str]) -> str:
        nonlocal size
        name = reference.group(1) or reference.group(2)
        if name is None:
            return "$"
        number = int(name) if name.isdigit() and len(name) < 4 else compiled.groupindex.get(name, -1)
        text = (match.group(number) or "") if 0 <= number <= compiled.groups else ""
        size += len(text)
        _check_length(size)
        return text

    return _GROUP.sub(group, template)


def _check_length(characters: int) -> None:
    if characters > VALUE_CHARACTERS_MAX:
        raise Invalid(f"a query makes a label of more than {VALUE_CHARACTERS_MAX} characters: make shorter ones")


def _bounded(texts: Iterable[str]) -> list[str]:
    """Return texts; `Invalid` if one of them, or all together, are too long."""
    values: list[str] = []
    size = 0
    for text in texts:
        _check_length(len(text))
        size += len(text)
        if size > VALUES_CHARACTERS_MAX:
            raise Invalid(f"a query makes labels of more than {VALUES_CHARACTERS_MAX} characters: select fewer series")
        values.append(text)
    return values


def label_join(vector: VectorValue, target: str, separator: str, sources: Sequence[str]) -> VectorValue:
    """Set a label to the values of others, joined."""
    for name in (target, *sources):
        check_label_name(name, "label_join")
    columns = [vector.labels.column(name) for name in sources]
    rows = LabelMatrix(
        [str(index) for index in range(len(columns))],
        [values for values, _ in columns],
        np.stack([codes for _, codes in columns], axis=1) if columns else np.zeros((len(vector), 0), np.int32),
    )
    numbers, first = rows.groups()
    _check_length(len(separator) * len(columns) + int(rows.take(first).characters().max(initial=0)))
    texts = _bounded(
        separator.join(values[code] for (values, _), code in zip(columns, codes, strict=True))
        for codes in rows.codes[first].tolist()
    )
    labels = vector.labels.replacing(target, texts, numbers)
    unnamed = np.zeros(len(vector), np.bool_) if target == METRIC_NAME else vector.unnamed
    return merged(VectorValue(labels, vector.values, vector.present, unnamed), SAME_LABELS)


def sort_by_value(vector: VectorValue, *, descending: bool) -> VectorValue:
    """Order the series of one step by value, NaNs last; other queries have no order."""
    if vector.values.shape[1] != 1:
        return vector
    values = vector.values[:, 0]
    return vector.take(np.lexsort((-values if descending else values, np.isnan(values))))


def sort_by_label(vector: VectorValue, names: Sequence[str], *, descending: bool) -> VectorValue:
    """Order the series of one step by labels, numbers in them as numbers."""
    if vector.values.shape[1] != 1:
        return vector
    label_sets = vector.labels.label_sets()

    def compare(one: int, other: int) -> int:
        a, b = label_sets[one], label_sets[other]
        for name in names:
            if (x := a.get(name, "")) != (y := b.get(name, "")):
                return _natural(x, y)
        x_all, y_all = sorted(a.items()), sorted(b.items())
        return (x_all > y_all) - (x_all < y_all)

    order: I64 = np.array(sorted(range(len(vector)), key=cmp_to_key(compare), reverse=descending), np.int64)
    return vector.take(order)


def _natural(one: str, other: str) -> int:
    """Compare texts, runs of digits by their numbers."""
    for a, b in zip(_CHUNKS.findall(one), _CHUNKS.findall(other), strict=False):
        if a == b:
            continue
        if a[0] in _DIGITS and b[0] in _DIGITS:
            x, y = a.lstrip("0"), b.lstrip("0")  # not as ints: Python refuses more than 4,300 digits
            if x != y:
                return -1 if (len(x), x) < (len(y), y) else 1
        return -1 if a < b else 1
    return (len(one) > len(other)) - (len(one) < len(other))


def absent_labels(matchers: Sequence[LabelMatcher]) -> LabelMatrix:
    """Return the labels that a selector names exactly once and by `=`: those of what is absent."""
    labels: dict[str, str] = {}
    named: set[str] = set()
    for matcher in matchers:
        if matcher.name == METRIC_NAME:
            continue
        if matcher.operator == "=" and matcher.name not in named:
            labels[matcher.name] = matcher.value
            named.add(matcher.name)
        else:
            labels.pop(matcher.name, None)
    return LabelMatrix.of([labels])
