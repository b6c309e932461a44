"""kill -9 of an owner that writes, archives, evicts, drops and collects: nothing acknowledged is missing after it."""

from __future__ import annotations

import gc
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import archive_kill_child
import pytest
from backup_kill_child import rounds_of

import penstock
from penstock.archive.object_urls import open_objects
from penstock.archive.objects import FILES, INDEX, ObjectStore
from penstock.host.os_files import OsFileSystem
from penstock.store.archive_run import read_listing, run_numbers
from penstock.store.identity import read_uuid


def lived(folder: Path, first: int, after: tuple[str, int]) -> tuple[int, int]:
    """Run the owner until it said a word so many times, and kill it; return the rounds written and archived."""
    child = subprocess.Popen(
        [sys.executable, archive_kill_child.__file__, str(folder), str(first)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    numbers = {"written": [first], "archived": [0], "evicted": [0]}
    try:
        for line in child.stdout:
            word, value = line.split()
            numbers[word].append(int(value))
            if len(numbers[after[0]]) > after[1]:
                break
    finally:
        child.send_signal(signal.SIGKILL)
        for line in child.stdout.read().splitlines():
            if len(parts := line.split()) == 2:
                numbers[parts[0]].append(int(parts[1]))
        child.wait(30)
        child.stdout.close()
    return max(numbers["written"]), max(numbers["archived"])


def check(folder: Path, written: int, archived: int, kill: int) -> int:
    again = folder / f"again{kill}"
    objects = open_objects(f"file://{folder.absolute()}/archive", OsFileSystem())
    if archived:
        uuid = read_uuid(OsFileSystem(), str(folder / "store"))
        assert uuid is not None
        penstock.reattach(objects.url, again, store=uuid.hex())
        with archive_kill_child.opened(folder, again.name) as copy:
            assert rounds_of(copy) >= archived
            for heir in list(objects.listed(f"{uuid.hex()}/heirs")):  # this copy does not live on
                objects.delete(heir.key)
        shutil.rmtree(again)
    with archive_kill_child.opened(folder) as store:
        rounds = rounds_of(store)
        assert rounds >= written
        for name in store.tables():
            if name.startswith("spare"):
                store.drop(name)
        store.compact("users")
        for _ in range(2):
            store.archive()
            store.evict()
            store._dropped.remove()
            store._collector.collect()
            store.collect_archive()
        assert store.verify_archive().damage == []
        report = store.check()
        assert report.ok, report
        assert left_over(store, objects) == set()
        assert rounds_of(store) == rounds
    return rounds


def left_over(store: penstock.Store, objects: ObjectStore) -> set[str]:
    """The objects that nothing names after a collection; what a version held until just now goes with the next one.

    A job that trains centroids reads a snapshot for as long as it runs, which holds what was replaced meanwhile.
    """
    own, left = store.uuid.hex(), set[str]()
    for _ in range(480):
        store._collector.collect()
        store.collect_archive()
        needed = {key for number in run_numbers(objects, own) for key in read_listing(objects, own, number).objects()}
        for name in store.tables():
            needed |= {chunk.object + end for chunk in store.chunks(name) for end in ("", INDEX)}
        there = {each.key for each in objects.listed(f"{own}/{FILES}")}
        left = there - needed
        if not left:
            break
        gc.collect()
        threading.Event().wait(0.25)
    return left


def kill_rounds(root: str, rounds: int, seed: int = 5) -> None:
    folder, chance, first = Path(root), random.Random(seed), 0
    folder.mkdir(exist_ok=True)
    for kill in range(rounds):
        word = chance.choice(["written", "archived", "evicted"])
        written, archived = lived(folder, first, (word, chance.randint(1, 5)))
        first = check(folder, written, archived, kill)


def test_a_killed_owner_of_an_archived_store(tmp_path: Path) -> None:
    written, archived = lived(tmp_path, 0, ("evicted", 2))
    check(tmp_path, written, archived, 0)


@pytest.mark.campaign
def test_an_owner_that_is_killed_again_and_again(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path), 12)
