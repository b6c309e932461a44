"""A member of a cluster: its journal runs on; a store is opened on it for each role it gets.

As a leader the store takes writes, and its journal is what a quorum has. As a follower it applies what the leader
writes, and serves reads. When the role changes, the store is closed and opened again: it is unknown whether entries
that a leader had not committed survive, so nothing of them may stay in memory. A member whose journal ends before its
leader's begins (its disk is new, or it was away for long) fetches a snapshot of the leader's store, which replaces its
own.

Thread: one watches the role, opens and closes the store; `store` and `close` from any.
Invariants: (1) the folder has one member process. (2) a store that takes writes belongs to one term.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from penstock.errors import Closed, Invalid, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.log import Log
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.manifest import Manifest
from penstock.partition.extent import highest_lsn
from penstock.replica.cluster_time import ClusterTime
from penstock.replica.file_channel import FileClient
from penstock.replica.identity import member_contexts
from penstock.replica.masters import HASH, Masters
from penstock.replica.raft_log import LAG_SEGMENTS
from penstock.replica.replicated import Replicated
from penstock.replica.seams import RaftTimes
from penstock.replica.state import FOUNDER, JOINING, MEMBER, StateFile, new_disk
from penstock.replica.tcp_link import TcpLink
from penstock.server.installing import SnapshotTaker, finish_installation
from penstock.server.member_files import FetchedFiles, MemberFiles
from penstock.server.service import Service
from penstock.server.tcp import serve_tcp
from penstock.store.following import RAFT_FILE
from penstock.store.identity import IDENTITY_BYTES, StoreIdentity, read_identity, write_identity
from penstock.store.settings import StoreSettings
from penstock.store.shipping import OUTGOING
from penstock.store.store import Store, open_store

logger = logging.getLogger(__name__)

WATCH_S = 0.5
RETRY_S = 1.0
OPEN_S = 30.0
FULL_S = (
    30.0  # between two attempts to leave the lead because of a full disk: what is known of the other disks may be old
)


class Member:
    """One member of a cluster."""

    def __init__(
        self,
        path: str | Path,
        name: str,
        addresses: Mapping[str, tuple[str, int]],
        *,
        cluster: bytes,
        certificates: Path,
        settings: StoreSettings | None = None,
        times: RaftTimes | None = None,
        serve: tuple[str, int] | None = None,
        tokens: Path | None = None,
        lag_segments: int = LAG_SEGMENTS,
        masters: str = HASH,
        clock: Clock | None = None,
    ) -> None:
        """`serve` is where clients connect over TCP, with `tokens` for their rights.

        The journal is kept for a member that is away, up to `lag_segments` segments; then it gets a snapshot.
        `masters` is the policy of the cluster: see `penstock.replica.masters`.
        """
        if name not in addresses:
            raise Invalid(f"{name} is not among the members {sorted(addresses)}")
        if len(cluster) != IDENTITY_BYTES:
            raise Invalid(f"a cluster is identified by {IDENTITY_BYTES} bytes, the same for every member")
        self._masters = Masters(masters, addresses).policy
        self.path, self.name = str(path).rstrip("/"), name
        self._serve, self._tokens, self._certificates = serve, tokens, certificates
        self._settings = settings or StoreSettings()
        self._fs, self._clock, self._random = OsFileSystem(), clock or SystemClock(), system_random()
        self._time = ClusterTime(self._clock)
        self._changed = threads.condition("server.member")
        self._store: Store | None = None  # guarded by _changed
        self._role: tuple[object, ...] = ()  # guarded by _changed: of that store
        self._led: object = None  # the last term in which its store took writes
        self._left_s = -FULL_S  # when it left the lead because its disk was full
        self._addresses, self._cluster, self._times = dict(addresses), cluster, times
        self._lag_segments = lag_segments
        self._sources: WeakSet[MemberFiles] = WeakSet()  # guarded by _changed: what others read here
        self._snapshot: FileClient | None = None  # the connection over which it came: entries are kept meanwhile
        self.snapshots_taken = 0
        self._closing = threading.Event()
        self._closed = False
        self._process = threads.process_id()
        try:
            make_dirs(self._fs, self.path)
            self._lock = self._fs.lock(f"{self.path}/MEMBER")
        except (FileExistsError, NotADirectoryError):
            raise Invalid(f"{self.path} is not a folder: give the folder of the member's store") from None
        try:
            self._contexts = member_contexts(certificates, name)
            self._fetched = FetchedFiles(self._fs, self.path, self._connect_files, self._clock)
            self._journal = self._open_journal()
        except BaseException:
            self._lock.release()
            raise
        self._thread = threads.spawn(self._watch, name=f"penstock-member-{name}")

    def _open_journal(self) -> Replicated:
        finish_installation(self._fs, self.path)
        remove_folder(self._fs, f"{self.path}/{OUTGOING}")  # of a process that died
        identity, others = self._prepare_folder(), [each for each in self._addresses if each != self.name]
        server, client = self._contexts
        self._link = TcpLink(
            self.name,
            self._addresses,
            cluster=self._cluster,
            server_context=server,
            client_context=client,
            clock=self._clock,
            open_source=self._open_source,
        )
        log = Log.open(
            self._fs,
            f"{self.path}/journal",
            random=self._random,
            settings=self._settings.journal,
            identity=identity.files,
        )
        try:
            journal = Replicated(
                log,
                StateFile(self._fs, f"{self.path}/{RAFT_FILE}"),
                member=self.name,
                others=others,
                link=self._link,
                clock=self._clock,
                random=self._random,
                times=self._times,
                stored=self._stored_lsn(),
                files=self._fetched,
                lag_segments=self._lag_segments,
                masters=self._masters,
                time=self._time,
            )
        except BaseException:
            log.close()
            raise
        self._fetched.sweep(journal.bodies())
        return journal

    def _prepare_folder(self) -> StoreIdentity:
        """Make the files of a new member, or check those of an old one."""
        identity, raft = read_identity(self._fs, self.path), f"{self.path}/{RAFT_FILE}"
        if identity is None:
            identity = StoreIdentity(self._cluster, self._cluster)
            write_identity(self._fs, self.path, identity)
        elif identity.uuid != self._cluster:
            raise Invalid(f"{self.path} has a store of another cluster: give an empty folder")
        if not self._fs.exists(raft):  # a new member: the files of a store first, then it is a member for good
            with open_store(self.path, settings=replace(self._settings, background=False, serve=False)) as store:
                is_empty = store.view().lsn == 0
            standing = MEMBER if len(self._addresses) == 1 else JOINING if is_empty else FOUNDER
            StateFile(self._fs, raft).save(new_disk(self._random, standing=standing))
        return identity

    def _stored_lsn(self) -> int:
        """Return the highest LSN that the files of the store hold."""
        manifest = Manifest.open(f"{self.path}/manifest", fs=self._fs, clock=self._clock, engine=LmdbEngine)
        try:
            return highest_lsn(manifest)
        finally:
            manifest.close()

    # -- roles

    def _watch(self) -> None:
        role: tuple[object, ...] = ()
        while not self._closing.is_set():
            try:
                role = self._follow_role(role)
            except Exception as error:
                threads.raise_interrupt(error)
                logger.warning("member %s cannot go on now, and tries again: %s", self.name, error)
                self._give_up_role()
                role = ()
                self._closing.wait(RETRY_S)
        self._end_store()

    def _follow_role(self, role: tuple[object, ...]) -> tuple[object, ...]:
        """Wait for a change, and open or close the store as it demands; return the role that it has now."""
        if self._journal.is_failed:
            self._end_store()
            self._journal.recover()
            return ()
        if (leader := self._journal.snapshot_from or self._fetched.lost) is not None:
            self._take_snapshot(leader)
            return ()
        new_role = self._journal.await_change(role, WATCH_S)
        failed = self._store is not None and self._store.is_failed
        if new_role == role and not failed:
            self._leave_if_full(role)
            if self._store is not None and not role[0]:
                self._store.follow_time()
            return role
        self._end_store()
        if not new_role:
            return ()
        if (
            new_role[0] and new_role[2] == self._led
        ):  # a term has one store that takes writes: what that left is not known
            self._journal.resign()
            return ()
        self._begin_store(new_role)
        return new_role

    def _leave_if_full(self, role: tuple[object, ...]) -> None:
        """Leave the lead to a member that can take writes, if the disk of this one is full."""
        now_s, full = self._clock.monotonic_s(), self._store is not None and self._store.is_full
        self._journal.note_space(full=full)
        leads_full = full and role and role[0]
        if leads_full and now_s - self._left_s >= FULL_S and not self._journal.others_are_full:
            logger.warning("member %s leaves the lead: its disk is full", self.name)
            self._left_s = now_s
            self._journal.resign()

    # -- snapshots

    def _connect_files(self, member: str) -> FileClient:
        address = self._link.address_of(member)
        return FileClient(self.name, member, address, cluster=self._cluster, context=self._contexts[1])

    def _open_source(self) -> MemberFiles:
        source = MemberFiles(self._fs, self.path, self._store_to_ship, self._random)
        with self._changed:
            self._sources.add(source)
        return source

    def _store_to_ship(self) -> Store:
        with self._changed:
            if self._store is None or self._journal.leader != self.name:
                raise WaitExpired(f"member {self.name} has no store to give a snapshot of: ask the leader")
            return self._store

    def _take_snapshot(self, leader: str) -> None:
        """Replace the store by a snapshot of the leader's. What was fetched stays for the next attempt if it fails."""
        logger.info("member %s takes a snapshot from %s", self.name, leader)
        client = self._connect_files(leader)
        try:
            taker = SnapshotTaker(
                self._fs, self.path, stop=lambda: self._closing.is_set() or self._journal.leader != leader
            )
            listing = taker.fetch(client)
        except BaseException:
            client.close()
            raise
        self._fetched.lost = None
        self._end_store()
        self._journal.close()  # from here on no entry is appended or acknowledged
        self._snapshot = client
        if not self._journal.has_entry(listing.end):  # else another leader sent the entries meanwhile
            taker.make_ready(listing, self._cluster)
        self._reopen()
        self.snapshots_taken += 1

    def _reopen(self) -> None:
        while not self._closing.is_set():
            try:
                self._journal = self._open_journal()
            except Exception as error:
                threads.raise_interrupt(error)
                logger.warning("member %s cannot open its journal, and tries again: %s", self.name, error)
                self._closing.wait(RETRY_S)
            else:
                return

    def _end_snapshot(self) -> None:
        client, self._snapshot = self._snapshot, None
        if client is not None:
            client.close()

    def move(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Use other addresses of the other members from now on."""
        unknown = sorted(set(addresses) - set(self._addresses))
        if unknown:
            logger.warning("member %s does not know %s: members are not added", self.name, ", ".join(unknown))
        new_addresses = {name: at for name, at in addresses.items() if name in self._addresses and name != self.name}
        self._addresses.update(new_addresses)
        self._link.move(new_addresses)

    # -- the store of a role

    def _give_up_role(self) -> None:
        """After a failure: leave the lead to a member that can open its store."""
        self._end_store()
        try:
            self._journal.resign()
        except PenstockError as error:
            logger.warning("member %s cannot resign: %s", self.name, error)

    def _begin_store(self, role: tuple[object, ...]) -> None:
        self._led = role[2] if role[0] else self._led
        tenure = self._journal.tenure(role)
        store = open_store(self.path, settings=self._settings, fs=self._fs, clock=self._time, consensus=tenure)
        try:
            if self._settings.serve and self._settings.background:
                Service(store, random=self._random)
                if self._serve is not None and self._tokens is not None:
                    certificate, key = (self._certificates / f"{self.name}.{end}" for end in ("pem", "key"))
                    serve_tcp(store, *self._serve, certificate=certificate, key=key, tokens=self._tokens)
        except BaseException:
            store.close()
            raise
        with self._changed:
            self._store, self._role = store, role
            self._changed.notify_all()
        if role[0]:
            self._time.lead(store.clock_us)
        self._end_snapshot()
        logger.info("member %s %s in term %d", self.name, "leads" if role[0] else "follows", self._journal.current_term)

    def _end_store(self) -> None:
        with self._changed:
            store, self._store, self._role = self._store, None, ()
            sources = list(self._sources)
        self._time.lead(None)
        for source in sources:
            source.close()
        if store is not None:
            try:
                store.close()
            except Exception as error:  # the thread that watches must go on
                threads.raise_interrupt(error)
                logger.warning("member %s: %s", self.name, error)

    # -- use

    @property
    def is_leader(self) -> bool:
        """Whether the store of this member takes writes now."""
        with self._changed:
            return self._store is not None and bool(self._role and self._role[0]) and self._journal.is_leader

    @property
    def leader(self) -> str | None:
        """The name of the member that leads, if one is known."""
        return self._journal.leader

    @property
    def is_joining(self) -> bool:
        """Whether this member does not vote yet: its disk is new."""
        return self._journal.is_joining

    @property
    def committed(self) -> int:
        """The LSN of the last record that this member knows to be on a quorum."""
        return self._journal.committed

    def store(self, timeout_s: float = OPEN_S) -> Store:
        """Return the store of the present role; it is closed when the role changes."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while self._store is None:
                if self._closing.is_set():
                    raise Closed(f"member {self.name} is closed: start it again")
                rest_s = deadline_s - self._clock.monotonic_s()
                if rest_s <= 0:
                    raise WaitExpired(f"member {self.name} has no leader to follow: start a quorum of members")
                self._changed.wait(min(rest_s, WATCH_S))
            return self._store

    def close(self) -> None:
        """End the store and the journal; a second call does nothing, nor does one in a forked child."""
        if not self._closed and threads.process_id() == self._process:
            threads.run_uninterrupted(self._close)

    def _close(self) -> None:
        self._closing.set()
        self._fetched.close()
        self._thread.join(OPEN_S)
        self._end_snapshot()
        self._journal.close()
        self._lock.release()
        self._closed = True
