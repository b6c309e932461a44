"""How many Python functions the hot paths run: they are counted, because a time would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import penstock

DURABLE_PUT_CALLS_MAX = 52
PUT_CALLS_MAX = 5
GET_CALLS_MAX = 5


def calls_of(act: Callable[[], object]) -> list[str]:
    """The Python functions that `act` runs in this thread, itself excluded."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls[1:]


def fewest(act: Callable[[], object]) -> list[str]:
    """The calls of the best of many attempts: now and then the clock ticks, or the background thread has the turn."""
    return min((calls_of(act) for _ in range(50)), key=len)


def test_hot_paths_run_few_functions(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        users = store.kv("users")
        users.put(b"ada", b"1815", durable=True)
        assert len(calls := fewest(lambda: users.put(b"ada", b"1815", durable=True))) <= DURABLE_PUT_CALLS_MAX, calls
        assert len(calls := fewest(lambda: users.get(b"ada"))) <= GET_CALLS_MAX, calls
        store.flush()
        assert len(calls := fewest(lambda: users.put(b"ada", b"1852"))) <= PUT_CALLS_MAX, calls


def test_calls_are_counted() -> None:
    def two() -> None:
        one()

    def one() -> None: ...

    assert calls_of(two) == ["test_store_calls.py:one"]
