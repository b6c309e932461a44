"""What a client asks the owner to do or report: maintenance, backups, the archive, reports, and work for drivers.

Each is one request; a long wait takes several.

Thread: any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from penstock.client.reading import FlightReading
from penstock.errors import WaitExpired
from penstock.host.clock import Clock
from penstock.lsm.manual_compaction import CompactionReport
from penstock.partition.aside import Trouble
from penstock.protocol import wire
from penstock.scheduler.offers import Offer
from penstock.store.archive_settings import ArchiveReport, EvictReport, VerifyReport
from penstock.store.reports import BackupReport, CheckReport, ChunkSummary, JobSummary, RotationReport, StoreStatistics
from penstock.store.views import StoreView

T = TypeVar("T")
COMPACT_S = 3600.0  # for a compaction, after others on its table have ended


class OwnerRequests(FlightReading):
    """Requests of a client that are neither reads nor writes of its tables."""

    _clock: Clock

    @abstractmethod
    def _flush_writes(self) -> None:
        """Send what was written before: the answer includes it."""

    def _in_requests(self, ask: Callable[[float], T], timeout_s: float, request_s: float = wire.WAIT_S_MAX) -> T:
        """Call `ask` with the seconds that its request may wait, again while time is left; return its answer."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            try:
                return ask(min(max(0.0, deadline_s - self._clock.monotonic_s()), request_s))
            except WaitExpired:
                if self._clock.monotonic_s() >= deadline_s:
                    raise

    # -- maintenance

    def trigger(self, task: str) -> None:
        """Run a background task of the owner now."""
        self._connection.ask(wire.TriggerTask(task), None)  # type: ignore[arg-type]

    def tasks(self) -> list[str]:
        """Return the names of the owner's background tasks."""
        return self._connection.ask(wire.ListTasks(), list[str])

    def troubles(self) -> list[Trouble]:
        """Return the acknowledged writes that cannot be read, and why."""
        return self._connection.ask(wire.ListTroubles(), list[Trouble])

    def check(self, timeout_s: float) -> CheckReport:
        """Have the owner read every file of the store."""
        return self._connection.ask(wire.CheckStore(), CheckReport, wait_s=timeout_s)

    def backup(self, target: str, keep: int | None, timeout_s: float) -> BackupReport:
        """Have the owner back the store up."""
        self._flush_writes()
        return self._connection.ask(wire.BackupStore(target, keep), BackupReport, repeat=False, wait_s=timeout_s)

    def archive(self, timeout_s: float) -> ArchiveReport:
        """Have the owner make an archive run."""
        self._flush_writes()
        return self._connection.ask(wire.ArchiveStore(), ArchiveReport, repeat=False, wait_s=timeout_s)

    def evict(self, name: str | None, local_bytes: int, timeout_s: float) -> EvictReport:
        """Have the owner evict files."""
        return self._connection.ask(wire.EvictFiles(name, local_bytes), EvictReport, wait_s=timeout_s)

    def rehydrate(self, name: str | None, timeout_s: float) -> int:
        """Have the owner fetch evicted files."""
        return self._connection.ask(wire.RehydrateFiles(name), int, wait_s=timeout_s)

    def verify_archive(self, name: str | None, timeout_s: float) -> VerifyReport:
        """Have the owner read archived objects."""
        return self._connection.ask(wire.VerifyArchive(name), VerifyReport, wait_s=timeout_s)

    def collect_archive(self, timeout_s: float) -> int:
        """Have the owner delete objects that nothing names."""
        return self._connection.ask(wire.CollectArchive(), int, wait_s=timeout_s)

    def compact(self, name: str, timeout_s: float) -> CompactionReport:
        """Merge a table into as few files as possible; the owner may take COMPACT_S for it."""
        self._flush_writes()
        request = wire.CompactTable(name, timeout_s)
        return self._connection.ask(request, CompactionReport, wait_s=timeout_s + COMPACT_S)

    def jobs(self) -> list[JobSummary]:
        """Return the jobs of the tables that this client may read."""
        return self._connection.ask(wire.ListJobs(), list[JobSummary])

    def retry_job(self, job: int) -> int:
        """Enqueue a failed job once more; return the new one's number."""
        return self._connection.ask(wire.RetryJob(job), int, repeat=False)

    def run_jobs(self, name: str, timeout_s: float) -> int:
        """Do the background work of a table that is due; the owner may take COMPACT_S for it."""
        self._flush_writes()
        return self._connection.ask(wire.RunJobs(name, timeout_s), int, wait_s=timeout_s + COMPACT_S)

    def chunks(self, name: str) -> list[ChunkSummary]:
        """Return the files of a table."""
        return self._connection.ask(wire.ListChunks(name), list[ChunkSummary])

    def resume(self, name: str) -> list[Trouble]:
        """Let a paused table try again; return the troubles that remain."""
        return self._connection.ask(wire.ResumeTable(name), list[Trouble])

    def keep_snapshot(self, name: str) -> list[int]:
        """Copy the files of a table, so that `repair` can restore it; the owner may take COMPACT_S for it."""
        self._flush_writes()
        return self._connection.ask(wire.KeepSnapshot(name), list[int], wait_s=COMPACT_S)

    def drop_snapshot(self, name: str) -> None:
        """Remove the copy of a table's files."""
        self._connection.ask(wire.DropSnapshot(name), None)  # type: ignore[arg-type]

    def repair(self, name: str) -> list[Trouble]:
        """Replace the files of a table by their copy; the owner may take COMPACT_S for it."""
        self._flush_writes()
        return self._connection.ask(wire.RepairTable(name), list[Trouble], wait_s=COMPACT_S)

    def exposition(self) -> str:
        """Return the owner's metrics in Prometheus' text format."""
        return self._connection.ask(wire.ReadMetrics(), str)

    def statistics(self) -> StoreStatistics:
        """Return the owner's statistics; what this client wrote before is in them."""
        self._flush_writes()
        return self._connection.ask(wire.ReadStatistics(), StoreStatistics)

    def view(self) -> StoreView:
        """Return how far the owner is; what this client wrote before is in it."""
        self._flush_writes()
        return self._connection.ask(wire.AwaitView(0, 0.0), StoreView)

    def rotate_keys(self) -> RotationReport:
        """Wrap the keys of all encrypted tables with the owner's newest master key."""
        return self._connection.ask(wire.RotateKeys(), RotationReport, wait_s=COMPACT_S)

    # -- how far it is

    def wait_view(self, after: int, timeout_s: float) -> StoreView:
        """Wait for a view of the owner with a higher applied epoch than `after`, or raise `WaitExpired`."""

        def newer(wait_s: float) -> StoreView:
            view = self._connection.ask(wire.AwaitView(after, wait_s), StoreView, wait_s=wait_s)
            if view.applied_epoch > after:  # else it was only read: there was no time left
                return view
            raise WaitExpired(f"the store had no newer view within {timeout_s} s: wait again")

        return self._in_requests(newer, timeout_s, wire.VIEW_S_MAX)

    # -- work for drivers

    def take_offer(self, slots: int) -> Offer | None:
        """Take work for a driver that runs `slots` parts at once; None if there is none."""
        offers = self._connection.ask(wire.TakeOffer(slots), list[Offer])
        return offers[0] if offers else None

    def keep_offer(self, offer: str) -> bool:
        """Renew an offer that is being worked on; False if it was withdrawn."""
        return self._connection.ask(wire.KeepOffer(offer), bool)

    def finish_offer(self, offer: str, results: list[bytes]) -> bool:
        """Deliver the packed result of each part; False if the offer was withdrawn."""
        return self._connection.ask(wire.FinishOffer(offer, results), bool)

    def fail_offer(self, offer: str, reason: str) -> None:
        """Report that the work of an offer failed."""
        self._connection.ask(wire.FailOffer(offer, reason), None)  # type: ignore[arg-type]

    def read_offered(self, offer: str, name: str, offset: int) -> bytes:
        """Read bytes of an offer's input file; empty past its end."""
        return self._connection.ask(wire.ReadOffered(offer, name, offset), bytes)

    def write_offered(self, offer: str, name: str, offset: int, data: bytes) -> None:
        """Write bytes of an offer's output file; offset 0 starts it over."""
        self._connection.ask(wire.WriteOffered(offer, name, offset, data), None)  # type: ignore[arg-type]
