"""A kv table is a mapping of Python: the same answers as a dict with its keys in order."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test import mapping_tests

import penstock
from penstock.errors import Invalid

KEYS = st.sampled_from([b"", b"a", b"b", b"ab", b"\xff", b"\xff\xff"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
        st.tuples(st.sampled_from(["del", "pop", "pop or 5", "setdefault", "in"]), KEYS, st.integers(0, 9)),
        st.tuples(st.just("update"), st.dictionaries(KEYS, st.integers(0, 9))),
        st.tuples(st.sampled_from(["popitem", "clear", "len", "bool", "read"])),
    ),
    max_size=12,
)


@pytest.fixture(scope="module", params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("store")) as owner:
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(owner.path) as client:
                yield client


def step(mapping: MutableMapping[bytes, int], name: str, *arguments: Any) -> Any:
    """Do one thing with a mapping: what it answers, or which error it raises."""
    try:
        match name:
            case "set":
                mapping[arguments[0]] = arguments[1]
            case "del":
                del mapping[arguments[0]]
            case "pop":
                return mapping.pop(arguments[0])
            case "pop or 5":
                return mapping.pop(arguments[0], 5)
            case "setdefault":
                return mapping.setdefault(*arguments)
            case "in":
                return arguments[0] in mapping, mapping.get(arguments[0]), mapping.get(arguments[0], 7)
            case "update":
                mapping.update(arguments[0])
            case "popitem":
                key, value = mapping.popitem()
                mapping[key] = value  # a dict takes its last item, a table its first: not the same, and both are right
                return len(mapping)
            case "clear":
                mapping.clear()
            case "len":
                return len(mapping)
            case "bool":
                return bool(mapping)
            case "read":
                return sorted(mapping), sorted(mapping.keys()), sorted(mapping.items()), sorted(mapping.values())
    except KeyError as error:
        return type(error)
    return None


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, shards=st.sampled_from([1, 3]))
def test_the_same_answers_as_a_dict(store: Any, steps: list[Any], shards: int) -> None:
    table, model = store.kv(f"t{shards}", value="int64", shards=shards), dict[bytes, int]()
    table.clear()
    for name, *arguments in steps:
        assert step(table, name, *arguments) == step(model, name, *arguments), name
    assert table == model
    assert dict(table) == model
    assert list(table) == sorted(model), "in order of the keys"


def test_it_is_one(store: Any) -> None:
    table = store.kv("users", value="utf8")
    table.update({b"ada": "1815", b"eve": "1"})
    store.flush()
    assert issubclass(type(table), MutableMapping)
    with store.snapshot() as snapshot:
        view = snapshot.kv("users", value="utf8")
        assert isinstance(view, Mapping)
        assert not isinstance(view, MutableMapping)
        assert {**view} == {**table} == {b"ada": "1815", b"eve": "1"}
    assert b"ada" in table.keys()  # noqa: SIM118 - the view is what is tried
    assert (b"ada", "1815") in table.items()
    assert "1815" in table.values()
    assert table.keys() & {b"ada"} == {b"ada"}
    assert table.count(prefix=b"a") == 1
    with pytest.raises(KeyError):
        table[b"nobody"]


def test_update_is_whole_or_not_at_all(store: Any) -> None:
    table = store.kv("numbers", value="int64")
    table.clear()
    for bad in ({b"a": 1, b"b": "2"}, [(b"a", 1), (b"b", None)], {b"a": 1, "b": 2}):
        with pytest.raises(Invalid):
            table.update(bad)
    with pytest.raises(Invalid, match="a key is bytes"):
        table.update(a=1)
    with pytest.raises(Invalid, match="one mapping"):
        table.update({b"a": 1}, {b"b": 2})
    assert not table
    table.update([(b"a", 1)])
    table.update()
    assert dict(table) == {b"a": 1}


def test_a_name_to_look_at(store: Any, tmp_path: Path) -> None:
    assert repr(store.kv("looked_at", value="json", shards=2)) == "<KvTable 'looked_at' of json, 2 shards>"


# -- CPython's own tests of mappings

REFERENCES: dict[str, dict[Any, bytes]] = {
    "bytes": {b"1": b"2", b"key1": b"value1", b"key2": b"value2"},
    "utf8": {"1": b"2", "key1": b"value1", "kéy2": b"value2"},
}
TESTS_OF_MAPPINGS = unittest.TestLoader().getTestCaseNames(mapping_tests.BasicTestMappingProtocol)


@pytest.mark.parametrize("key", ["bytes", "utf8"])
@pytest.mark.parametrize("name", TESTS_OF_MAPPINGS)
def test_what_python_asks_of_a_mapping(store: Any, key: str, name: str) -> None:
    class OfATable(mapping_tests.BasicTestMappingProtocol):  # type: ignore[misc]
        def _reference(self) -> dict[Any, bytes]:
            return REFERENCES[key]

        def _empty_mapping(self) -> Any:
            table = store.kv(f"mapping_{key}_{next(numbers)}", key=key)
            table.clear()
            return table

    numbers = itertools.count()
    getattr(OfATable(name), name)()


def test_update_by_name_is_for_keys_of_text(store: Any) -> None:
    table = store.kv("names", key="utf8")
    table.update({"a": b"1"}, b=b"2")
    assert dict(table) == {"a": b"1", "b": b"2"}
    for wrong in (42, [1], [("a", b"1", b"2")], None):
        with pytest.raises(Invalid):
            table.update(wrong)
    with pytest.raises(Invalid):
        store.kv("t1", value="int64").update(b=2)
