"""The clock of a store: it follows the wall clock slowly and never jumps.

Records, expiry, retention and tokens use this clock. It advances with the time since boot and is slewed towards the
wall clock by at most a tenth of the time that passes. So a wall clock that jumps, either way, expires nothing too early
and delays expiry little, and a wall clock that was corrected, or moved on while the machine slept, is caught up with.

Only opening a store can add time at once, because nothing counted while it was closed. Within one boot a note in the
store's folder says how much time passed. After another boot the wall clock is trusted, but only for one day if the
machine has just started, because its clock may not be set yet.

Thread: any; `save_note` by one thread at a time.
Invariants: (1) after `begin` it never steps: in `t` seconds it advances by 0.9 to 1.1 `t`. The one exception is a clock
that began before 2020, which takes the first later wall clock. (2) `time_us` does no I/O.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

import google_crc32c

from penstock.host import threads
from penstock.host.clock import UNKNOWN_BOOT, Clock
from penstock.host.files import FileSystem

logger = logging.getLogger(__name__)

DAY_US = 86_400 * 1_000_000
EARLIEST_US = 1_577_836_800 * 1_000_000  # 2020: an earlier clock was never set
LATEST_US = 7_258_118_400 * 1_000_000  # 2200
GAP_US_MAX = 3_650 * DAY_US  # a store that seems to have been closed for longer: the clock is wrong
UNSURE_GAP_US_MAX = DAY_US  # the same, of a machine that has just started
UNSURE_BOOT_US = 300 * 1_000_000  # how long a machine may take to set its clock after it started
SLEW = 10  # the clock runs faster or slower by at most 1 / SLEW
TICK_US = 1_000_000  # how often the wall clock is read
REPORT_US = 60 * 1_000_000  # the difference to the wall clock from which a warning is logged
NOTE_US = 1_000_000  # the error of the note at which it is written again

_NOTE = struct.Struct("<qq64sI")  # time, time since boot, boot, CRC32C of that and the store's identity
NOTE_BYTES = _NOTE.size


@dataclass(frozen=True, slots=True)
class TimeNote:
    """The time of a store at one moment of one boot."""

    time_us: int
    boot_us: int
    boot_id: bytes

    def encode(self, identity: bytes) -> bytes:
        body = _NOTE.pack(self.time_us, self.boot_us, self.boot_id, 0)[:-4]
        return body + struct.pack("<I", google_crc32c.value(identity + body))

    @classmethod
    def decode(cls, data: bytes, identity: bytes) -> TimeNote | None:
        """Return the note; None if it is damaged or belongs to another store."""
        if len(data) != NOTE_BYTES or data[-4:] != struct.pack("<I", google_crc32c.value(identity + data[:-4])):
            return None
        time_us, boot_us, boot_id, _ = _NOTE.unpack(data)
        return cls(time_us, boot_us, boot_id.rstrip(b"\0"))


def opening_time_us(last_us: int, note: TimeNote | None, clock: Clock, *, trust: bool) -> int:
    """Return the time with which a store starts whose newest record has the time `last_us`."""
    wall_us, boot_us = clamp_wall_time(clock.time_us()), clock.boot_us()
    if note is not None:
        last_us = max(last_us, note.time_us)
    if trust or last_us < EARLIEST_US:
        return max(last_us, wall_us)
    if note is not None and note.boot_id == clock.boot_id() != UNKNOWN_BOOT and note.boot_us <= boot_us:
        return max(last_us, note.time_us + boot_us - note.boot_us)
    if not 0 < wall_us - last_us <= GAP_US_MAX:
        return last_us
    return wall_us if boot_us >= UNSURE_BOOT_US else min(wall_us, last_us + UNSURE_GAP_US_MAX)


def clamp_wall_time(wall_us: int) -> int:
    """Clamp a wall-clock time to what records can carry."""
    return min(max(wall_us, 0), LATEST_US)


def _clamp(change_us: int, most_us: int) -> int:
    return max(-most_us, min(most_us, change_us))


class SteadyClock:
    """The clock of one store; the wall clock until `begin`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boot_us = clock.boot_us  # bound once: every read uses it
        self.monotonic_s = clock.monotonic_s
        self.boot_us = clock.boot_us
        self.boot_id = clock.boot_id
        self._lock = threads.lock("host.steady_clock")
        self._reported_us = 0  # the difference at the last warning
        self._noted_us: int | None = None  # the note's time minus the time since boot
        self.wall_ahead_us = 0  # wall clock minus this clock
        # Time since boot at its start, this clock's time there, and what it adds per tick. Replaced whole.
        self._line = (clock.boot_us(), clamp_wall_time(clock.time_us()), 0)

    def begin(self, last_us: int, note: TimeNote | None, *, trust: bool = False) -> None:
        """Continue from the newest record's time. `trust`: take the wall clock as it is."""
        time_us = opening_time_us(last_us, note, self._clock, trust=trust)
        with self._lock:
            self._line = (self._boot_us(), time_us, 0)
            self.wall_ahead_us = self._clock.time_us() - time_us

    def time_us(self) -> int:
        """Return microseconds since 1970 in UTC, by the store's clock."""
        since_us, base_us, extra_us = self._line
        passed_us = self._boot_us() - since_us
        if passed_us < TICK_US:
            return base_us + passed_us + extra_us * passed_us // TICK_US
        return self._tick()

    def _tick(self) -> int:
        """Read the wall clock and choose the slew until the next tick."""
        with self._lock:
            since_us, base_us, extra_us = self._line
            at_us, wall_us = self._boot_us(), self._clock.time_us()
            late_us = at_us - since_us - TICK_US
            if late_us >= 0:
                target_us = clamp_wall_time(wall_us)
                time_us = base_us + TICK_US + extra_us + late_us
                if time_us < EARLIEST_US <= wall_us:
                    time_us = target_us  # it was never set: ages counted so far were guesses
                time_us += _clamp(target_us - time_us, late_us // SLEW)
                self._line = (at_us, time_us, _clamp(target_us - time_us, TICK_US // SLEW))
                self.wall_ahead_us = wall_us - time_us
        return self.time_us()

    # -- warnings, and the note for the next opening

    def wall_ahead_s(self) -> float:
        """Return how far the wall clock was ahead of this one at the last tick."""
        return self.wall_ahead_us / 1_000_000

    def save_note(self, fs: FileSystem, path: str, identity: bytes) -> None:
        """Warn if the wall clock is far off, and write the note for the next opening.

        Nothing is synced: the note is used only within this boot, and the page cache lasts as long.
        """
        time_us, at_us = self.time_us(), self._boot_us()
        if abs(self.wall_ahead_us - self._reported_us) > REPORT_US:
            self._report()
        if self._noted_us is None or abs(time_us - at_us - self._noted_us) > NOTE_US:
            self._noted_us = time_us - at_us
            note = TimeNote(time_us, at_us, self._clock.boot_id()[:64]).encode(identity)
            try:
                file = fs.open(path, write=True) if fs.exists(path) else fs.create(path)
                try:
                    file.pwrite(note, 0)
                finally:
                    file.close()
            except OSError as error:
                logger.warning("%s could not be written (%s): the next opening uses the wall clock", path, error)

    def _report(self) -> None:
        self._reported_us = self.wall_ahead_us
        if self.wall_ahead_us > REPORT_US:
            logger.warning(
                "the wall clock is %.0f s ahead of the store's time, which follows slowly: correct the clock, or, if "
                "it is right, open the store once with trust_clock=True",
                self.wall_ahead_us / 1_000_000,
            )
        elif self.wall_ahead_us < -REPORT_US:
            logger.warning(
                "the wall clock is %.0f s behind the store's time, which never goes back: correct the clock, or wait "
                "until it has caught up",
                -self.wall_ahead_us / 1_000_000,
            )


def read_note(fs: FileSystem, path: str, identity: bytes) -> TimeNote | None:
    """Return the note of an earlier opening, if there is a valid one."""
    try:
        if not fs.exists(path):
            return None
        file = fs.open(path)
        try:
            note = TimeNote.decode(file.pread(NOTE_BYTES + 1, 0), identity)
        finally:
            file.close()
    except OSError as error:
        logger.warning("%s could not be read (%s): the store uses the wall clock", path, error)
        return None
    if note is None:
        logger.warning("%s is damaged: the store uses the wall clock", path)
    return note
