"""Members of a cluster in one thread: a seeded schedule of messages, crashes and proposals, with its own time.

Every member has a simulated disk, which forgets at a crash what was not synced. Messages are delivered in any order,
twice, late or never, and some pairs of members may not reach each other, in one direction or in both.

Thread: the test's.
Invariants, checked after every step: (1) a term has one leader. (2) members that have committed an index have the same
entry there. (3) what was acknowledged is committed under its LSN; at the end every member has it, once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import msgspec
import pysyncobj.syncobj

from penstock.errors import PenstockError
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.log import Log, LogSettings
from penstock.replica.messages import Message, pack, unpack
from penstock.replica.proposal import Proposal
from penstock.replica.raft import Raft
from penstock.replica.raft_log import RaftLog
from penstock.replica.seams import RaftTimes
from penstock.replica.state import JOINING, MEMBER, StateFile, new_disk
from penstock.testing.crashes import Violation
from penstock.testing.disk import SimulatedDisk

SETTINGS = LogSettings(segment_bytes=1 << 16, allocate_bytes=4096, index_bytes=512)
IN_FLIGHT_MAX = 400  # messages; the oldest are lost beyond it
TICK_S = 0.02


class SimulatedMember:
    """A member, its disk, and its process while it runs."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self._cluster, self.name = cluster, name
        self.raft: Raft | None = None
        self.log: RaftLog | None = None
        self.wipe()
        self.start()

    def wipe(self) -> None:
        """Lose the disk. Requires: the process does not run."""
        self.disk = SimulatedDisk()
        self.stored: dict[int, bytes] = {}  # by LSN: what its store has of the records that its log dropped
        state = StateFile(self.disk, "/raft")
        state.save(new_disk(self._cluster.random, standing=self._cluster.standing))

    @property
    def is_member(self) -> bool:
        """Whether it votes: its disk knows what it promised."""
        return StateFile(self.disk, "/raft").state.standing == MEMBER

    def records(self) -> dict[int, bytes]:
        """Return the committed records of this member, by LSN. Requires: it runs."""
        assert self.log is not None
        return {**self.stored, **dict(self.log.records(self.log.base.lsn + 1))}

    def cut(self) -> None:
        """Store all that is committed and drop what others do not need, as a checkpoint does."""
        assert self.log is not None
        assert self.raft is not None
        self.stored = self.records()
        self.log.lag_segments = self._cluster.random.randrange(1, 4)
        self.log.roll()
        self.log.cut_front(self.log.lsn_at(self.log.committed) + 1, self.raft.may_cut_before())

    def install(self, leader: SimulatedMember) -> None:
        """Take a snapshot of the leader: its store, and its log from some record on."""
        assert self.log is not None
        assert leader.log is not None
        if leader.disk.exists("/outgoing"):
            remove_folder(leader.disk, "/outgoing")
        leader.disk.mkdir("/outgoing")
        first = self._cluster.random.randrange(leader.log.base.lsn + 1, leader.log.lsn_at(leader.log.committed) + 2)
        base, end = leader.log.copy_to("/outgoing", first)
        if self.log.has(end.index, end.term):  # another leader sent them meanwhile
            return
        self.crash("kept")
        state = StateFile(self.disk, "/raft")
        remove_folder(self.disk, "/journal")
        make_dirs(self.disk, "/journal")
        for name in leader.disk.listdir("/outgoing"):
            _copy_file(leader.disk, f"/outgoing/{name}", self.disk, f"/journal/{name}")
        self.disk.fsync_dir("/journal")
        state.save(msgspec.structs.replace(state.state, bases=(base,)))
        self.stored = {lsn: body for lsn, body in leader.records().items() if lsn <= end.lsn}
        self.start()

    def start(self) -> None:
        """Start the process, on what its disk has."""
        cluster = self._cluster
        log = Log.open(self.disk, "/journal", random=cluster.random, settings=SETTINGS)
        self.log = cluster.make_log(log, StateFile(self.disk, "/raft"))
        others = [name for name in cluster.names if name != self.name]
        self.raft = cluster.make_raft(self.name, others, self.log, self, times=cluster.times, random=cluster.random)
        for name in others:
            self.raft.connect(name)

    def crash(self, mode: str) -> None:
        """End the process, as by a power failure (`strict`, `torn`) or a kill (`kept`)."""
        self.disk = self.disk.image().restore(mode, self._cluster.random.randrange(1 << 30))  # type: ignore[arg-type]
        if self.raft is not None:
            self.raft.fail_proposals(PenstockError("the member was killed"))
        self.raft = self.log = None

    # -- Link

    def send(self, member: str, message: Message) -> None:
        self._cluster.post(self.name, member, pack(message))

    def has_room(self, member: str) -> bool:
        return self._cluster.waiting[self.name, member] < 20


class SimulatedCluster:
    """Members and the messages between them.

    >>> from penstock.testing.network import SimulatedCluster
    >>> with SimulatedCluster(seed=1) as cluster:
    ...     cluster.run(200)
    ...     cluster.heal()
    """

    make_log = RaftLog  # negative controls replace these
    make_raft = Raft
    standing = JOINING  # of a new disk

    def __init__(self, *, seed: int, members: int = 3) -> None:
        self.random = random.Random(seed)
        self.names = [f"member-{number}" for number in range(1, members + 1)]
        self.times = RaftTimes()
        self.now_s = 1_000.0
        self.messages: list[tuple[str, str, bytes]] = []
        self.waiting: Counter[tuple[str, str]] = Counter()
        self.blocked: set[tuple[str, str]] = set()
        self.proposals: list[tuple[Proposal, bytes]] = []
        self.committed: dict[int, tuple[int, object]] = {}  # index: term and record, as committed first
        self._checked: dict[str, int] = {}
        self.leaders: dict[int, str] = {}  # by term
        self.done: Counter[str] = Counter()  # what the schedule did
        self._numbers = 0
        self._time = pysyncobj.syncobj.monotonicTime

    def __enter__(self) -> Self:
        pysyncobj.syncobj.monotonicTime = lambda: self.now_s
        self.members = {name: SimulatedMember(self, name) for name in self.names}
        return self

    def __exit__(self, *_: object) -> None:
        pysyncobj.syncobj.monotonicTime = self._time

    # -- messages

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        self.messages.append((sender, receiver, data))
        self.waiting[sender, receiver] += 1
        if len(self.messages) > IN_FLIGHT_MAX:
            self._take(0)
            self.done["lost"] += 1

    def _take(self, index: int) -> tuple[str, str, bytes]:
        message = self.messages.pop(index)
        self.waiting[message[:2]] -= 1
        return message

    def deliver(self, index: int) -> None:
        """Deliver one message, if its way is open and its receiver runs."""
        sender, receiver, data = self._take(index)
        raft = self.members[receiver].raft
        if raft is not None and (sender, receiver) not in self.blocked:
            raft.receive(sender, unpack(data))
            raft._send_waiting()
            self.done["delivered"] += 1

    # -- the schedule

    def run(self, steps: int, *, faults: bool = True) -> None:
        """Make random steps, with faults or without."""
        for _ in range(steps):
            self.step(faults=faults)
            self.check()

    def step(self, *, faults: bool) -> None:
        chance = self.random.random()
        if faults and chance < 0.02:
            self._fault()
        elif chance < 0.03:
            self.install_snapshots()
        elif chance < 0.10:
            self._propose()
        elif chance < 0.55 and self.messages:
            in_order = self.random.random() < 0.8
            self.deliver(0 if in_order else self.random.randrange(len(self.messages)))
        else:
            self.tick(self.random.choice(self.names))

    def tick(self, name: str) -> None:
        self.now_s += TICK_S / len(self.names)
        raft = self.members[name].raft
        if raft is not None:
            raft.tick(0.0)

    def _propose(self) -> None:
        leaders = [member for member in self.members.values() if member.raft is not None and member.raft._isLeader()]
        if leaders:
            self._numbers += 1
            body = b"record %d" % self._numbers
            proposal = Proposal([body])
            self.proposals.append((proposal, body))
            raft = self.random.choice(leaders).raft
            assert raft is not None
            raft.submit(proposal)
            self.done["proposed"] += 1

    def _fault(self) -> None:
        fault = self.random.choice(
            ("crash", "crash", "start", "block", "open", "double", "lose", "all", "cut", "cut", "wipe")
        )
        self.done[fault] += 1
        member = self.members[self.random.choice(self.names)]
        mode = self.random.choice(("strict", "torn", "kept"))
        if fault == "crash" and member.raft is not None:
            member.crash(mode)
        elif fault == "start" and member.raft is None:
            member.start()
        elif fault == "cut" and member.log is not None:
            member.cut()
        elif fault == "wipe":
            self._wipe(member)
        elif fault == "block":
            sender, receiver = self.random.sample(self.names, 2)
            self.blocked |= (
                {(sender, receiver)} if self.random.random() < 0.5 else {(sender, receiver), (receiver, sender)}
            )
        elif fault == "open":
            self.blocked.clear()
        elif fault == "double" and self.messages:
            self.post(*self.random.choice(self.messages))
        elif fault == "lose" and self.messages:
            self._take(self.random.randrange(len(self.messages)))
        elif fault == "all":
            for each in self.members.values():
                if each.raft is not None:
                    each.crash(mode)
                each.start()

    def _wipe(self, member: SimulatedMember) -> None:
        """Let a member lose its disk, if all others have theirs: of three members, only one may lose it."""
        if all(other.is_member for other in self.members.values() if other is not member):
            if member.raft is not None:
                member.crash("kept")
            member.wipe()
            self.done["wiped"] += 1

    def install_snapshots(self) -> None:
        """Let members that need a snapshot take it, where their leader can be reached."""
        for member in self.members.values():
            leader = None if member.raft is None else self.members.get(member.raft.snapshot_from or "")
            if leader is None or leader.raft is None or not leader.raft._isLeader():
                continue
            if not {(leader.name, member.name), (member.name, leader.name)} & self.blocked:
                member.install(leader)
                self.done["installed"] += 1

    def heal(self, ticks: int = 3_000) -> None:
        """Start and connect all members, and run until they agree; then check what was acknowledged."""
        self.blocked.clear()
        for member in self.members.values():
            if member.raft is None:
                member.start()
        for _ in range(ticks):
            for name in self.names:
                self.tick(name)
            while self.messages:
                self.deliver(0)
            self.install_snapshots()
            self.check()
            logs = [member.log for member in self.members.values() if member.log is not None]
            if len({(log.last, log.committed) for log in logs}) == 1 and logs[0].committed == logs[0].last > 0:
                self.check_all()
                return
        raise Violation(f"the members did not agree within {ticks} ticks: {self.describe()}")

    # -- checks

    def check(self) -> None:
        """Check what holds at any time."""
        for name, member in self.members.items():
            if member.raft is None or member.log is None:
                self._checked[name] = 0
                continue
            if member.raft._isLeader():
                leader = self.leaders.setdefault(member.raft.term, name)
                if leader != name:
                    raise Violation(f"term {member.raft.term} has two leaders, {leader} and {name}")
            first = max(self._checked.get(name, 0), member.log.base.index) + 1
            while first <= member.log.committed:
                for entry in member.log.entries(first, 1 << 20):
                    if entry.index > member.log.committed:
                        break
                    original = self.committed.setdefault(entry.index, (entry.term, entry.command))
                    if original != (entry.term, entry.command):
                        raise Violation(f"{name} has committed another entry {entry.index}: {entry}, not {original}")
                    first = entry.index + 1
            self._checked[name] = member.log.committed

    def check_all(self) -> None:
        """Check, on members that agree, that each has every acknowledged record under its LSN, and none twice."""
        for name, member in self.members.items():
            assert member.log is not None
            records = member.records()
            if len(set(records.values())) != len(records):
                raise Violation(f"{name} has a record twice")
            for proposal, body in self.proposals:
                if proposal.lsn is not None and records.get(proposal.lsn) != body:
                    raise Violation(f"{name} lost {body!r}, which was acknowledged as {proposal.lsn}")

    def acknowledged(self) -> int:
        return sum(proposal.lsn is not None for proposal, _ in self.proposals)

    def describe(self) -> str:
        return ", ".join(
            f"{name}: {'down' if member.log is None else (member.log.last, member.log.committed)}"
            for name, member in self.members.items()
        )


def _copy_file(source: SimulatedDisk, name: str, target: SimulatedDisk, to: str) -> None:
    read, write = source.open(name), target.create(to)
    write.pwrite(read.pread(read.size(), 0), 0)
    write.fsync()
    read.close()
    write.close()


@contextmanager
def cluster_of(seed: int, members: int = 3) -> Iterator[SimulatedCluster]:
    """A cluster in its own time, for a test."""
    with SimulatedCluster(seed=seed, members=members) as cluster:
        yield cluster
