"""`penstock chunks archive|verify-archive|evict|rehydrate|collect` and `penstock reattach`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commands import penstock as run

import penstock
from penstock.archive.object_urls import open_objects
from penstock.host.os_files import OsFileSystem


def document(*words: str) -> dict[str, Any]:
    ended = run(*words, "--json")
    assert ended.code == 0, ended
    fields = json.loads(ended.out)
    assert isinstance(fields, dict)
    return fields


def test_the_way_to_the_archive_and_back(tmp_path: Path) -> None:
    path, url = str(tmp_path / "store"), f"file://{tmp_path}/archive"
    assert run("chunks", "archive", path).code == 3  # there is no store
    with penstock.open(path, archive=url) as store:
        store.kv("users").put_many([(b"%d" % key, b"x" * 50) for key in range(500)], durable=True)
        store.compact("users")
        assert document("chunks", "archive", path)["number"] == 1
        assert document("chunks", "evict", path, "--table", "users")["files"] == 1
        assert "evicted" in run("chunks", "list", path, "users").out
        assert document("chunks", "verify-archive", path)["damage"] == []
        assert document("chunks", "rehydrate", path)["bytes"] > 0
        assert document("chunks", "collect", path)["objects"] == 0
        assert document("reattach", url, str(tmp_path / "again"))["number"] == 1
        with penstock.open(tmp_path / "again") as again:  # the archive has two stores from now on
            again.archive()
        several = run("reattach", url, str(tmp_path / "third"))
        assert (several.code, "--uuid" in several.err) == (2, True)
        uuid = store.chunks("users")[0].object.partition("/")[0]
        assert document("reattach", url, str(tmp_path / "third"), "--uuid", uuid)["store"] == uuid
        objects = open_objects(url, OsFileSystem())
        key = store.chunks("users")[0].object
        objects.delete(key)
        damaged = run("chunks", "verify-archive", path)
        assert damaged.code == 1
        assert key in damaged.out
    with penstock.open(tmp_path / "none"):
        ended = run("chunks", "archive", str(tmp_path / "none"))
        assert ended.code == 2
        assert "has no archive" in ended.err
    assert run("reattach", "nonsense", str(tmp_path / "new")).code == 2
