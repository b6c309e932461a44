"""Label sets: rules, canonical bytes, fingerprints, tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptionError, Invalid
from penstock.series import labels as module
from penstock.series.labels import (
    LABELS_MAX,
    Labels,
    LabelTable,
    check_labels,
    check_table,
    decode_labels,
    decode_table,
    encode_labels,
    fingerprint_of,
    shard_number_of,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=4)
SETS = st.builds(
    check_labels, TEXTS.filter(bool), st.dictionaries(NAMES.filter(lambda name: name != "__name__"), TEXTS, max_size=4)
)


def test_labels_are_sorted_and_empty_values_are_absent() -> None:
    assert check_labels("cpu", {"z": "1", "a": "2", "none": ""}) == (("__name__", "cpu"), ("a", "2"), ("z", "1"))
    assert check_labels("cpu", None) == (("__name__", "cpu"),)


@pytest.mark.parametrize(
    ("metric", "labels", "message"),
    [
        ("", {}, "a metric has a name"),
        (b"cpu", {}, "a metric is a text"),
        ("cpu", {"__name__": "x"}, "give the metric apart"),
        ("cpu", {"": "x"}, "a label's name is a text"),
        ("cpu", {"a\0b": "x"}, "without NUL"),
        ("cpu", {"a": 1}, "the label 'a' is a text"),
        ("cpu", {"a": "\ud800"}, "the label 'a' is a text"),
        ("cpu", {"a" * 256: "x"}, "1 to 255 bytes"),
        ("cpu", {"a": "é" * 2049}, "at most 4096 bytes"),
        ("cpu", [("a", "b")], "labels are a mapping"),
        ("cpu", {f"l{n}": "x" for n in range(LABELS_MAX)}, "has 65 labels: at most 64"),
    ],
)
def test_wrong_labels_are_refused(metric: object, labels: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_labels(metric, labels)


def test_sizes_are_those_of_the_bytes() -> None:
    table = LabelTable.of([(("__name__", "é"),), (("__name__", "up"), ("host", "a" * 300)), (("__name__", "up"),)])
    assert table.label_sizes().tolist() == list(map(len, table.label_bytes()))


@given(SETS)
@settings(max_examples=50, deadline=None)
def test_canonical_bytes_come_back(labels: Labels) -> None:
    assert decode_labels(encode_labels(labels)) == labels


def test_other_bytes_are_refused() -> None:
    whole = encode_labels((("__name__", "cpu"), ("host", "é")))
    for cut in range(1, len(whole)):
        if cut != len(encode_labels((("__name__", "cpu"),))):
            with pytest.raises(CorruptionError):
                decode_labels(whole[:cut])


@given(st.lists(SETS, min_size=1, max_size=8, unique=True), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_table_keeps_its_label_sets(sets: list[Labels], shards: int) -> None:
    table = LabelTable.of(sets)
    check_table(table)
    copy = decode_table(table.encode())
    check_table(copy)
    for candidate in (table, copy):
        assert [candidate.labels(row) for row in range(len(candidate))] == sets
        assert candidate.label_bytes() == [encode_labels(labels) for labels in sets]
        assert candidate.fingerprints.tolist() == [list(fingerprint_of(labels)) for labels in sets]
    by_row: dict[int, Labels] = {}
    for shard, (part, rows) in enumerate(table.by_shard(shards)):
        check_table(part)
        assert part.encode() == LabelTable(part.names, part.values, part.codes).encode()
        for row, original in enumerate(rows.tolist()):
            assert shard_number_of(fingerprint_of(sets[original]), shards) == shard
            by_row[original] = part.labels(row)
    assert [by_row[row] for row in range(len(sets))] == sets


def test_a_malformed_table_is_refused() -> None:
    whole = LabelTable.of([check_labels("cpu", {"host": "é"}), check_labels("cpu", {"host": "b", "dc": "x"})]).encode()
    for cut in range(len(whole)):
        with pytest.raises(CorruptionError):
            decode_table(whole[:cut])
    with pytest.raises(CorruptionError):
        decode_table(whole + b"\0")


@pytest.mark.parametrize(
    ("names", "values", "codes", "message"),
    [
        (["host"], [["a"]], [[1]], "sorted and distinct"),
        (["a", "__name__"], [["a"], ["b"]], [[1, 1]], "sorted and distinct"),
        (["__name__"], [["a", "a"]], [[1]], "not distinct"),
        (["__name__"], [[""]], [[1]], "not distinct, or one is empty"),
        (["__name__"], [["a"]], [[2]], "fewer values"),
        (["__name__"], [["a"]], [[0]], "a metric has a name"),
        (["__name__"], [["a"]], [[1], [1]], "stands twice"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused(
    names: list[str], values: list[list[str]], codes: list[list[int]], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        check_table(LabelTable(names, values, np.array(codes, np.uint32)))


def test_fingerprints_can_be_made_to_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = check_labels("cpu", {"a": "1"}), check_labels("mem", {"b": "2"})
    assert fingerprint_of(one) != fingerprint_of(other)
    monkeypatch.setattr(module, "digest", lambda _: b"\1" * 16)
    assert fingerprint_of(one) == fingerprint_of(other)
    assert len(set(map(tuple, LabelTable.of([one, other]).fingerprints.tolist()))) == 1


def test_a_large_table_is_compressed_and_its_size_is_checked_first() -> None:
    table = LabelTable.of([check_labels("cpu", {"host": f"h{number}", "dc": "x"}) for number in range(500)])
    whole = table.encode()
    assert len(whole) * 2 < sum(map(len, table.label_bytes()))
    assert decode_table(whole).label_bytes() == table.label_bytes()
    for size in (1, len(whole), 1 << 20, (1 << 32) - 1):
        with pytest.raises(CorruptionError):
            decode_table(size.to_bytes(4, "little") + whole[4:])
    for cut in range(0, len(whole), 97):
        with pytest.raises(CorruptionError):
            decode_table(whole[:cut])
