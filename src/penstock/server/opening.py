"""`penstock.open`: own a store, and serve other processes.

Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.archive.master_keys import Keys
from penstock.archive.object_urls import check_url
from penstock.arguments import flag, in_short, seconds
from penstock.errors import Invalid, StoreLocked, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_errors import translate_os_errors
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import path_text
from penstock.host.randomness import Random, system_random
from penstock.host.waiting import Retries
from penstock.manifest.engine import EngineOpener
from penstock.manifest.environment import LmdbEngine
from penstock.protocol import locator
from penstock.protocol.folder import check_new_folder, store_folder
from penstock.server.service import Service
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

YIELD_S = 10.0  # for an owner that a client started and that is still in use


def open(  # noqa: A001 - penstock.open reads well
    path: str | Path,
    *,
    settings: StoreSettings | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
    engine: EngineOpener = LmdbEngine,
    timeout_s: float = YIELD_S,
    read_only: bool = False,
    keys: Keys | None = None,
    encrypt: bool | None = None,
    archive: str | None = None,
) -> Store:
    """Open the store in `path` as its owner; create it if it does not exist.

    `keys` are the master keys of encrypted tables: "file:PATH", "env:NAME", a dict of 32 bytes by version, or a
    function; by default what the variable PENSTOCK_KEYS says. `encrypt=True` encrypts new tables, unless they are
    created with `encrypted=False`. Both are also in `settings`.

    `read_only=True` reads an existing store that no process has open, also in a folder that cannot be written: it holds
    everything that was durable, nothing on disk changes, and writes raise `ReadOnly`. `StoreLocked` if it has an owner.

    `archive`: the URL of an object store for files of this store, as `s3://bucket/prefix` (`gs://`, `az://`,
    `file:///a/folder`); credentials come from the environment. The store remembers it.

    An owner that a client started yields once no client holds a snapshot or a lease in it; `StoreLocked` if that takes
    longer than `timeout_s`, and at once if another program opened the store.

    >>> with penstock.open("data/") as store:
    ...     epoch = store.kv("users").put(b"ada", b"1815", durable=True)
    """
    if settings is not None and not isinstance(settings, StoreSettings):
        raise Invalid(f"settings are a penstock.StoreSettings(...), not {in_short(settings)}")
    timeout_s = seconds(timeout_s, "timeout_s", math.inf)
    archive = None if archive is None else check_url(archive)
    settings = settings or StoreSettings()
    if keys is not None:
        settings = replace(settings, keys=keys)
    if encrypt is not None:
        settings = replace(settings, encrypt=flag(encrypt, "encrypt"))
    clock, random = clock or SystemClock(), random or system_random()
    is_real = fs is None or isinstance(fs, OsFileSystem)
    name = store_folder(path) if is_real else path_text(path)
    if is_real and not read_only:
        check_new_folder(name)
    if flag(read_only, "read_only"):
        try:
            return open_store(
                name, settings=settings, fs=fs, clock=clock, random=random, read_only=True, archive=archive
            )
        except StoreLocked as locked:
            owner = "this process: use that store" if locked.here else "another process: use penstock.connect"
            raise StoreLocked(f"{name} is open in {owner}, or close it first") from None
    opener = partial(open_store, name, settings=settings, clock=clock, random=random, engine=engine, archive=archive)
    if not settings.serve or not settings.background or not is_real:
        if settings.metrics_port is None:
            return opener(fs=fs)
        return threads.run_uninterrupted(lambda: _with_endpoint(opener(fs=fs)), undo=Store.close)
    files = fs if isinstance(fs, OsFileSystem) else OsFileSystem()
    return threads.run_uninterrupted(
        lambda: _open_and_serve(name, files, opener, clock=clock, random=random, timeout_s=timeout_s), undo=Store.close
    )


def _open_and_serve(
    name: str, files: OsFileSystem, opener: Callable[..., Store], *, clock: Clock, random: Random, timeout_s: float
) -> Store:
    deadline_s = clock.monotonic_s() + timeout_s
    with translate_os_errors():
        make_dirs(files, name)
        opening = locator.hold_opening(files, name, clock, deadline_s)
    try:
        while True:
            try:
                store = opener(fs=files, begins=False)
            except StoreLocked as locked:
                _ask_to_yield(name, locked, clock, deadline_s)
                continue
            try:
                with translate_os_errors():
                    Service(store, random=random)
            except BaseException:
                store.close()
                raise
            store = _with_endpoint(store)
            store.begin_background()
            return store
    finally:
        opening.release()


def _with_endpoint(store: Store) -> Store:
    """Return the store with the metrics endpoint that its settings ask for; close it if that fails."""
    if store.settings.metrics_port is not None:
        from penstock.server.metrics_endpoint import MetricsEndpoint

        try:
            MetricsEndpoint(store, store.settings.metrics_host, store.settings.metrics_port)
        except BaseException:
            store.close()
            raise
    return store


def _ask_to_yield(path: str, locked: StoreLocked, clock: Clock, deadline_s: float) -> None:
    """Ask an owner that a client started to yield; `StoreLocked` if it does not before the deadline."""
    if locked.here:
        raise StoreLocked(f"{path} is open in this process: use that store, or close it first") from None
    if locked.read_only:
        raise locked
    answer, reason = None, str(locked)
    try:
        answer = locator.ask_owner(path, "yield", deadline_s - clock.monotonic_s())
    except WaitExpired as error:
        reason = str(error)
    if answer is not None and not answer.detached:
        raise StoreLocked(f"{path} is owned by another program: close it there, or use penstock.connect") from locked
    if not Retries(clock, deadline_s).again():
        if answer is not None:
            reason = f"its owner is needed: {answer.reason}"
        raise StoreLocked(f"{path} is in use ({reason}): use penstock.connect, or try again") from locked
