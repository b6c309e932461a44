"""Giving memory back: it must do no harm, whatever the C library."""

from __future__ import annotations

import pytest

from penstock.host import memory


def test_release_can_be_called_any_time() -> None:
    memory.map_large_blocks()
    memory.release_free_memory()
    memory.release_free_memory()


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    memory._library.cache_clear()
    try:
        memory.release_free_memory()
        assert memory._library() is None
    finally:
        memory._library.cache_clear()
