"""A manifest against plain dicts: every operation, in random batches, with reopening at random points."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import FixTheCall, GateShut, UniqueJobAlreadyPending
from penstock.manifest import tables
from penstock.manifest.engine import ReadView
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ChunkKey, MetricKey, PendingJobKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import (
    BumpGeneration,
    DeleteChunk,
    DeleteDb,
    DeletePendingIndex,
    DeleteWalState,
    ManifestOp,
    MergeMetric,
    PutDb,
    PutJob,
    PutWalState,
    RemoveJob,
    UpdateJobState,
    UpsertChunk,
    UpsertPendingIndex,
)
from penstock.manifest.records import (
    Active,
    ChunkEntryRecord,
    Completed,
    DbDescriptorRecord,
    FailedPermanent,
    InFlight,
    JobDurableState,
    JobRecord,
    ManifestDbOptions,
    MetricDelta,
    Pending,
    Tombstoned,
    WalStateRecord,
)
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine


class Refused(Exception):
    """The model says that a batch breaks a rule."""


@dataclass
class Model:
    """The manifest in dicts, its rules written down a second time."""

    names: dict[int, str] = field(default_factory=dict)  # live tables
    dropped: set[int] = field(default_factory=set)
    progress: dict[tuple[int, int], int] = field(default_factory=dict)
    files: dict[tuple[int, int], str] = field(default_factory=dict)
    jobs: dict[int, dict[str, Any]] = field(default_factory=dict)
    pending: dict[tuple[int, int], int] = field(default_factory=dict)
    gates: dict[tuple[int, int], int] = field(default_factory=dict)
    metrics: dict[int, tuple[float, int]] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)

    def apply(self, batch: list[ManifestOp]) -> None:
        for op in batch:
            if not isinstance(op, MergeMetric | BumpGeneration):
                getattr(self, type(op).__name__)(op)
        for job_id, job in self.jobs.items():
            if (self.pending.get(job["place"]) == job_id) != (job["state"] == "Pending"):
                raise Refused
        bumps = [op for op in batch if isinstance(op, BumpGeneration)]
        for op in batch:
            if isinstance(op, MergeMetric):
                total, count = self.metrics.get(op.key.kind, (0.0, 0))
                self.metrics[op.key.kind] = (total + op.delta.sum, count + 1)
        for bump in bumps or [BumpGeneration(1)]:
            if bump.increment < 1:
                raise Refused
            self.generations[bump.component] = self.generations.get(bump.component, 0) + bump.increment

    def PutDb(self, op: PutDb) -> None:
        self.names.pop(op.db_id, None)
        if isinstance(op.value.status, Tombstoned):
            self.dropped.add(op.db_id)
            return
        if op.db_id in self.dropped or op.value.name in self.names.values():
            raise Refused
        self.names[op.db_id] = op.value.name

    def DeleteDb(self, op: DeleteDb) -> None:
        used = any(table == op.db_id for table, _ in (*self.files, *self.progress))
        if op.db_id in self.names or (op.db_id in self.dropped and used):
            raise Refused
        self.dropped.discard(op.db_id)

    def PutWalState(self, op: PutWalState) -> None:
        self.progress[op.key] = max(self.progress.get(op.key, 0), op.value.stored_lsn)

    def DeleteWalState(self, op: DeleteWalState) -> None:
        if op.key.shard == 0 and any(table == op.key.db_id for table, _ in self.gates):
            raise Refused
        self.progress.pop(op.key, None)

    def UpsertChunk(self, op: UpsertChunk) -> None:
        self.files.pop(op.key, None)
        if op.value.file_name in self.files.values():
            raise Refused
        self.files[op.key] = op.value.file_name

    def DeleteChunk(self, op: DeleteChunk) -> None:
        self.files.pop(op.key, None)

    def PutJob(self, op: PutJob) -> None:
        job = op.value
        if job.job_id in self.jobs:
            raise Refused
        gate_key = (job.db_id or 0, job.kind)
        self.jobs[job.job_id] = {"state": "Pending", "place": gate_key, "attempts": 0}

    def UpsertPendingIndex(self, op: UpsertPendingIndex) -> None:
        if op.job_id not in self.jobs or self.jobs[op.job_id]["place"] != op.key:
            raise Refused
        if self.pending.get(op.key, op.job_id) != op.job_id:
            raise Refused
        self.pending[op.key] = op.job_id

    def DeletePendingIndex(self, op: DeletePendingIndex) -> None:
        self.pending.pop(op.key, None)

    def UpdateJobState(self, op: UpdateJobState) -> None:
        job = self.jobs.get(op.job_id)
        if job is None:
            raise Refused
        old, new, gate_key = job["state"], type(op.new_state).__name__, job["place"]
        if (old, new) == ("Pending", "InFlight"):
            assert isinstance(op.new_state, InFlight)
            if op.new_state.token != job["attempts"] + 1 or gate_key in self.gates:
                raise Refused
            job["attempts"] += 1
            self.gates[gate_key] = op.job_id
            self.progress.setdefault((gate_key[0], 0), 0)
            self._leave_pending(op.job_id, gate_key)
        elif old == "InFlight" and new != "InFlight":
            if op.token != job["attempts"]:
                raise Refused
            del self.gates[gate_key]
        elif (old, new) == ("Pending", "FailedPermanent"):
            self._leave_pending(op.job_id, gate_key)
        else:
            raise Refused
        job["state"] = new

    def RemoveJob(self, op: RemoveJob) -> None:
        job = self.jobs.get(op.job_id)
        if job is None or job["state"] == "InFlight":
            raise Refused
        if job["state"] == "Pending":
            self._leave_pending(op.job_id, job["place"])
        del self.jobs[op.job_id]

    def _leave_pending(self, job_id: int, gate_key: tuple[int, int]) -> None:
        if self.pending.get(gate_key) == job_id:
            del self.pending[gate_key]


def stored(view: ReadView) -> Model:
    """What a manifest holds, in the words of the model."""
    states = dict(tables.WAL_STATE.scan(view))
    return Model(
        names={i: r.name for i, r in tables.DB.scan(view) if not isinstance(r.status, Tombstoned)},
        dropped={i for i, r in tables.DB.scan(view) if isinstance(r.status, Tombstoned)},
        progress={(key.db_id, key.shard): state.stored_lsn for key, state in states.items()},
        files={(key.db_id, key.chunk_id): record.file_name for key, record in tables.CHUNKS.scan(view)},
        jobs={
            i: {"state": type(r.state).__name__, "place": (r.db_id or 0, r.kind), "attempts": r.attempts}
            for i, r in tables.JOBS.scan(view)
        },
        pending={(key.db_id, key.kind): row.job_id for key, row in tables.PENDING.scan(view)},
        gates={
            (key.db_id, kind): gate.active_job_id
            for key, state in states.items()
            for kind, gate in state.gates()
            if gate.active_job_id is not None
        },
        metrics={key.kind: (r.sum, r.count) for key, r in tables.METRICS.scan(view)},
        generations={i: r.current_generation for i, r in tables.GENERATIONS.scan(view)},
    )


small = st.integers(1, 3)
job_ids = st.integers(1, 5)
kinds = st.sampled_from([1, 3, 64])
job_keys = st.builds(PendingJobKey, st.integers(0, 1), kinds)
partitions = st.builds(WalStateKey, st.integers(0, 1), st.integers(0, 1))
chunk_keys = st.builds(ChunkKey, st.just(1), st.integers(1, 2))
states = st.one_of(
    st.just(Pending()),
    st.builds(InFlight, st.just("w"), st.just(1), small),
    st.just(Completed(1)),
    st.just(FailedPermanent(1)),
)


def descriptor(name: str, dropped: bool) -> DbDescriptorRecord:
    options = ManifestDbOptions("log", "chunks")
    return DbDescriptorRecord(1, name, bytes(32), 1, options, Tombstoned(1) if dropped else Active())


def job(job_id: int, db_id: int | None, kind: int) -> JobRecord:
    return JobRecord(job_id, 1, db_id, kind)


def delta(value: int) -> MetricDelta:
    return MetricDelta(float(value), 1, float(value), float(value))


chunk_changes: st.SearchStrategy[list[ManifestOp]] = st.one_of(
    st.builds(lambda k, n: [UpsertChunk(k, ChunkEntryRecord(n, 1, 1))], chunk_keys, st.sampled_from("abc")),
    st.builds(lambda k: [DeleteChunk(k)], chunk_keys),
)
progress_changes: st.SearchStrategy[list[ManifestOp]] = st.one_of(
    st.builds(lambda k, n: [PutWalState(k, WalStateRecord(n, 9, 9, 9))], partitions, st.integers(0, 9)),
    st.builds(lambda k: [DeleteWalState(k)], partitions),
)
enqueues: st.SearchStrategy[list[ManifestOp]] = st.builds(
    lambda i, d, k: [PutJob(job(i, d, k)), UpsertPendingIndex(PendingJobKey(d or 0, k), i)],
    job_ids,
    st.sampled_from([None, 1]),
    kinds,
)
operations: st.SearchStrategy[list[ManifestOp]] = st.one_of(
    st.builds(lambda i, d: [PutDb(i, d)], small, st.builds(descriptor, st.sampled_from(["a", "b"]), st.booleans())),
    st.builds(lambda i: [DeleteDb(i)], small),
    chunk_changes,
    progress_changes,
    enqueues,
    st.builds(lambda i, d, k: [PutJob(job(i, d, k))], job_ids, st.sampled_from([None, 1]), kinds),
    st.builds(lambda i, s, t: [UpdateJobState(i, s, t)], job_ids, states, st.sampled_from([None, 1, 2])),
    st.builds(
        lambda i, k: [UpdateJobState(i, Pending(), 1), UpsertPendingIndex(k, i)],
        job_ids,
        job_keys,
    ),
    st.builds(lambda i: [RemoveJob(i)], job_ids),
    st.builds(lambda k, i: [UpsertPendingIndex(k, i)], job_keys, job_ids),
    st.builds(lambda k: [DeletePendingIndex(k)], job_keys),
    st.builds(lambda k, n: [MergeMetric(MetricKey(1, k), delta(n))], small, small),
    st.builds(lambda c, n: [BumpGeneration(c, n)], small, st.integers(0, 3)),
)
batches = st.lists(operations, max_size=4).map(lambda parts: [op for part in parts for op in part])


class ManifestMachine(RuleBasedStateMachine):
    """Batches and reopening, on one of the engines."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock, self.disk = FakeClock(), SimulatedDisk()
        self.open()
        self.model = Model()

    def open(self) -> None:
        self.manifest = Manifest.open(f"{self.folder.name}/manifest", clock=self.clock)

    @rule(batch=batches)
    def commit_anything(self, batch: list[ManifestOp]) -> None:
        self.commit(batch)

    # Most random batches are refused for one reason or another; these lead into the states behind.

    @rule(batch=chunk_changes)
    def change_chunks(self, batch: list[ManifestOp]) -> None:
        self.commit(batch)

    @rule(batch=progress_changes)
    def change_progress(self, batch: list[ManifestOp]) -> None:
        self.commit(batch)

    @rule(batch=enqueues)
    def enqueue(self, batch: list[ManifestOp]) -> None:
        self.commit(batch)

    @precondition(lambda self: self.model.pending)
    @rule(data=st.data(), worker=st.sampled_from("vw"))
    def lease(self, data: st.DataObject, worker: str) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model.pending.values())))
        self.commit([UpdateJobState(job_id, InFlight(worker, 1, self.model.jobs[job_id]["attempts"] + 1))])

    @precondition(lambda self: self.model.gates)
    @rule(data=st.data(), state=st.sampled_from([Pending(), Completed(1), FailedPermanent(1)]))
    def end(self, data: st.DataObject, state: JobDurableState) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model.gates.values())))
        model = self.model.jobs[job_id]
        batch: list[ManifestOp] = [UpdateJobState(job_id, state, model["attempts"])]
        if isinstance(state, Pending):
            batch.append(UpsertPendingIndex(PendingJobKey(*model["place"]), job_id))
        self.commit(batch)

    @precondition(lambda self: self.model.gates)
    @rule(data=st.data(), stored_lsn=st.integers(0, 9))
    def change_progress_beside_a_held_gate(self, data: st.DataObject, stored_lsn: int) -> None:
        db_id, _ = data.draw(st.sampled_from(sorted(self.model.gates)))
        self.commit([PutWalState(WalStateKey(db_id, 0), WalStateRecord(stored_lsn, 9, 9, 9))])

    @precondition(lambda self: len(self.model.jobs) > 2)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.commit([RemoveJob(data.draw(st.sampled_from(sorted(self.model.jobs))))])

    def commit(self, batch: list[ManifestOp]) -> None:
        after = copy.deepcopy(self.model)
        try:
            after.apply(batch)
        except Refused:
            after = self.model
        try:
            receipt = self.manifest.apply(batch)
        except (FixTheCall, GateShut, UniqueJobAlreadyPending):
            assert after is self.model, "the manifest refused what the model accepts"
        else:
            assert after is not self.model, "the manifest accepted what the model refuses"
            assert receipt.generation == max(after.generations[c] for c in receipt.generations)
        self.model = after

    @rule()
    def reopen(self) -> None:
        self.manifest.close()
        self.open()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "manifest"):
            assert self.manifest.read(stored) == self.model
            assert self.manifest.read(lambda view: list(check_all(view))) == []
            assert all(self.manifest.generation(c) == n for c, n in self.model.generations.items())

    def teardown(self) -> None:
        if hasattr(self, "manifest"):
            self.manifest.close()
            self.folder.cleanup()


class MemoryMachine(ManifestMachine):
    """The same on the simulated disk: faster, so more of it."""

    def open(self) -> None:
        self.manifest = Manifest.open("manifest", fs=self.disk, clock=self.clock, engine=MemoryEngine)


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLmdbMachine = ManifestMachine.TestCase
TestLmdbMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
