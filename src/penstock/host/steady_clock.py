"""The time of a store: it goes on as time passes, whatever happens to the machine's wall clock.

Records, expiry, retention and tokens go by this clock. It advances with the time since boot and is drawn towards the
wall clock by at most a tenth of the time that passes. So a wall clock that jumps, either way, expires nothing that is
not old and keeps nothing for long, and one that was set right, or stands after a pause of the machine, is followed.

Only opening a store can add time at once, because nobody counted while it was closed. Within one boot a note in the
store's folder tells how much passed. After another boot the wall clock is believed, but for a day only if the machine
has just started, when nobody may have set its clock yet.

Thread: any. `keep` by one at a time.
Invariants: (1) from `begin` on, no step: in `t` seconds it advances by 0.9 to 1.1 `t`. The one exception is a clock
that began before 2020, which takes the first wall clock after that. (2) `time_us` does no I/O.
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
EARLIEST_US = 1_577_836_800 * 1_000_000  # 2020: a clock before that was never set
LATEST_US = 7_258_118_400 * 1_000_000  # 2200
GAP_US_MAX = 3_650 * DAY_US  # a store that seems to have been closed for longer: the clock is wrong
UNSURE_GAP_US_MAX = DAY_US  # the same, of a machine that has just started
UNSURE_BOOT_US = 300 * 1_000_000  # how long a machine may take to set its clock after it started
SLEW = 10  # time passes faster or slower by one part in so many
TICK_US = 1_000_000  # how often the wall clock is looked at
REPORT_US = 60 * 1_000_000  # a difference to the wall clock that is worth a warning
NOTE_US = 1_000_000  # how wrong the note may become before it is written again

_NOTE = struct.Struct("<qq64sI")  # time, time since boot, boot, CRC32C of that and the store's identity
NOTE_BYTES = _NOTE.size


@dataclass(frozen=True, slots=True)
class TimeNote:
    """What the clock of a store showed at one moment of one boot."""

    time_us: int
    boot_us: int
    boot_id: bytes

    def encode(self, identity: bytes) -> bytes:
        body = _NOTE.pack(self.time_us, self.boot_us, self.boot_id, 0)[:-4]
        return body + struct.pack("<I", google_crc32c.value(identity + body))

    @classmethod
    def decode(cls, data: bytes, identity: bytes) -> TimeNote | None:
        """The note; None if it was not written whole, or is another store's."""
        if len(data) != NOTE_BYTES or data[-4:] != struct.pack("<I", google_crc32c.value(identity + data[:-4])):
            return None
        time_us, boot_us, boot_id, _ = _NOTE.unpack(data)
        return cls(time_us, boot_us, boot_id.rstrip(b"\0"))


def opening_time_us(last_us: int, note: TimeNote | None, clock: Clock, *, trust: bool) -> int:
    """The time with which a store begins whose newest record is of `last_us`."""
    wall_us, boot_us = plausible(clock.time_us()), clock.boot_us()
    if note is not None:
        last_us = max(last_us, note.time_us)
    if trust or last_us < EARLIEST_US:
        return max(last_us, wall_us)
    if note is not None and note.boot_id == clock.boot_id() != UNKNOWN_BOOT and note.boot_us <= boot_us:
        return max(last_us, note.time_us + boot_us - note.boot_us)
    if not 0 < wall_us - last_us <= GAP_US_MAX:
        return last_us
    return wall_us if boot_us >= UNSURE_BOOT_US else min(wall_us, last_us + UNSURE_GAP_US_MAX)


def plausible(wall_us: int) -> int:
    """A wall clock's time, within what records can carry."""
    return min(max(wall_us, 0), LATEST_US)


def _at_most(change_us: int, most_us: int) -> int:
    return max(-most_us, min(most_us, change_us))


class SteadyClock:
    """The clock of one store; the wall clock until `begin`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._boot_us = clock.boot_us  # bound once: reads ask for the time
        self.monotonic_s = clock.monotonic_s
        self.boot_us = clock.boot_us
        self.boot_id = clock.boot_id
        self._lock = threads.lock("host.steady_clock")
        self._reported_us = 0  # the difference that the last warning spoke of
        self._noted_us: int | None = None  # how far the note is ahead of the time since boot
        self.away_us = 0  # by how much the wall clock is ahead
        # From when on it counts, from what time, and how much it adds in one tick. Replaced whole.
        self._line = (clock.boot_us(), plausible(clock.time_us()), 0)

    def begin(self, last_us: int, note: TimeNote | None, *, trust: bool = False) -> None:
        """Go on from the newest record. `trust`: take the wall clock as it is."""
        time_us = opening_time_us(last_us, note, self._clock, trust=trust)
        with self._lock:
            self._line = (self._boot_us(), time_us, 0)
            self.away_us = self._clock.time_us() - time_us

    def time_us(self) -> int:
        """Microseconds since 1970 in UTC, as the store counts them."""
        since_us, base_us, extra_us = self._line
        passed_us = self._boot_us() - since_us
        if passed_us < TICK_US:
            return base_us + passed_us + extra_us * passed_us // TICK_US
        return self._tick()

    def _tick(self) -> int:
        """Look at the wall clock, and choose how to go towards it until the next look."""
        with self._lock:
            since_us, base_us, extra_us = self._line
            at_us, wall_us = self._boot_us(), self._clock.time_us()
            late_us = at_us - since_us - TICK_US
            if late_us >= 0:
                wanted_us = plausible(wall_us)
                time_us = base_us + TICK_US + extra_us + late_us
                if time_us < EARLIEST_US <= wall_us:
                    time_us = wanted_us  # it was never set: every age that was counted so far is a guess
                time_us += _at_most(wanted_us - time_us, late_us // SLEW)
                self._line = (at_us, time_us, _at_most(wanted_us - time_us, TICK_US // SLEW))
                self.away_us = wall_us - time_us
        return self.time_us()

    # -- what is told and kept

    def ahead_s(self) -> float:
        """By how much the wall clock was ahead of this one at the last look."""
        return self.away_us / 1_000_000

    def keep(self, fs: FileSystem, path: str, identity: bytes) -> None:
        """Report a wall clock that is far off, and note for the next opening how much time has passed.

        Nothing is synced: the note counts only within this boot, and the system's memory lasts as long.
        """
        time_us, at_us = self.time_us(), self._boot_us()
        if abs(self.away_us - self._reported_us) > REPORT_US:
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
                logger.warning("%s could not be written (%s): the next opening goes by the wall clock", path, error)

    def _report(self) -> None:
        self._reported_us = self.away_us
        if self.away_us > REPORT_US:
            logger.warning(
                "the wall clock is %.0f s ahead of the store's time, which follows slowly: set the clock right, or, if "
                "it is right, open the store once with trust_clock=True",
                self.away_us / 1_000_000,
            )
        elif self.away_us < -REPORT_US:
            logger.warning(
                "the wall clock is %.0f s behind the store's time, which does not go back: set the clock right, or "
                "leave it, and the two will meet",
                -self.away_us / 1_000_000,
            )


def read_note(fs: FileSystem, path: str, identity: bytes) -> TimeNote | None:
    """The note of an earlier opening, if there is one that reads."""
    try:
        if not fs.exists(path):
            return None
        file = fs.open(path)
        try:
            note = TimeNote.decode(file.pread(NOTE_BYTES + 1, 0), identity)
        finally:
            file.close()
    except OSError as error:
        logger.warning("%s could not be read (%s): the store goes by the wall clock", path, error)
        return None
    if note is None:
        logger.warning("%s does not read: the store goes by the wall clock", path)
    return note
