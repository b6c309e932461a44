"""Mappings: without a descriptor, as long as somebody looks, and no more of them than fit."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptionError, ProcessLimit
from penstock.host import mappings
from penstock.host.mappings import HOLDERS_MIN, HUGE_PAGE, Mappings, holders_max
from penstock.host.os_files import OsFileSystem


class Holder:
    def __init__(self) -> None:
        self.holds = True

    def forget(self) -> None:
        self.holds = False


def mapped(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


def test_a_mapping_keeps_no_descriptor_and_goes_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 100)
    file = OsFileSystem().open(str(path))
    before = len(os.listdir("/proc/self/fd"))
    views = [file.map(25_000) for _ in range(50)]
    file.close()
    assert len(os.listdir("/proc/self/fd")) < before  # its own is gone, and there is no other
    assert mapped(str(path)) == 50
    path.unlink()
    assert all(bytes(view) == (bytes(range(256)) * 100)[:25_000] for view in views)
    part = views[0][300:303]
    del views
    gc.collect()
    assert mapped(str(path)) == 1
    assert bytes(part) == b",-."
    del part
    gc.collect()
    assert mapped(str(path)) == 0


def test_a_mapping_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"data")
    view = OsFileSystem().open(str(path)).map(4)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    mapping: Any = view.obj
    assert mapping[1:3] == b"at"  # a slice of what is mapped is bytes: a get goes this way


def test_a_file_that_is_too_short_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"data")
    with pytest.raises(CorruptionError, match="5 bytes were expected"):
        OsFileSystem().open(str(path)).map(5)


def test_the_oldest_holders_let_go() -> None:
    registry = Mappings(lambda: 3)
    holders = [Holder() for _ in range(5)]
    for holder in holders:
        registry.register(holder)
    assert [holder.holds for holder in holders] == [False, False, True, True, True]
    del holders[2:4], holder
    gc.collect()
    registry.register(last := Holder())
    assert holders[2].holds
    assert last.holds
    assert registry.release_some()  # the older half
    assert [holders[2].holds, last.holds] == [False, True]
    assert registry.release_some()
    assert not registry.release_some()


def test_the_limit_is_a_part_of_the_machines() -> None:
    assert HOLDERS_MIN <= holders_max() <= mappings._maps_max() // 4


def test_no_mapping_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others let go, and it is tried again; when nobody is left, a typed error."""
    path = tmp_path / "f"
    path.write_bytes(b"data")
    registry, real, failures = Mappings(lambda: 9), mappings._map, [1, 1]
    monkeypatch.setattr(mappings, "MAPPINGS", registry)

    def scarce(fd: int, size: int) -> object:
        if failures:
            failures.pop()
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, size)

    monkeypatch.setattr(mappings, "_map", scarce)
    holders = [Holder() for _ in range(2)]
    for holder in holders:
        registry.register(holder)
    assert bytes(OsFileSystem().open(str(path)).map(4)) == b"data"
    assert not any(holder.holds for holder in holders)
    failures.append(1)
    with pytest.raises(ProcessLimit, match="max_map_count"):
        OsFileSystem().open(str(path)).map(4)
    assert bytes(OsFileSystem().open(str(path)).map(4)) == b"data"


def test_an_error_of_the_kernel_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mappings.map_file(1 << 20, 4096, "nowhere")


@pytest.mark.parametrize("size", [1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 4_097])
def test_a_mapping_has_the_bytes_of_its_file_from_the_first_to_the_last(tmp_path: Path, size: int) -> None:
    """Also the object behind the view, which reads slice: it may be longer, and begins with the file."""
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    file = OsFileSystem().open(f"{tmp_path}/file")
    view = file.map(size)
    assert view == data
    behind: Any = view.obj
    assert behind[:size] == data
    file.close()
