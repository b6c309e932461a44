"""Retries of object stores: with backoff, on failures of the network alone, within one deadline.

An operation that failed may have happened. A repeated `put_new` then finds the object and returns False: the caller
compares it with what it wanted to write.

Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from penstock.archive.objects import NetworkFailure, ObjectStore, StoredObject
from penstock.arguments import seconds, whole
from penstock.errors import ArchiveUnavailable
from penstock.host.clock import Clock
from penstock.host.files import Buffer
from penstock.host.randomness import Random
from penstock.host.waiting import Retries

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetrySettings:
    """How often and how long an operation is tried."""

    attempts_max: int = 6
    timeout_s: float = 300.0  # of all attempts together; one that runs is not ended
    pause_s: float = 0.2  # before the second attempt; doubled for each further one
    pause_s_max: float = 10.0

    def __post_init__(self) -> None:
        whole(self.attempts_max, "attempts_max", 1, 1_000)
        seconds(self.timeout_s, "timeout_s", 86_400.0)
        seconds(self.pause_s, "pause_s", 3_600.0)
        seconds(self.pause_s_max, "pause_s_max", 3_600.0)


class RetryingObjects:
    """An object store whose operations are repeated when the network fails."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        clock: Clock,
        random: Random,
        settings: RetrySettings | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.url = objects.url
        self._objects = objects
        self._clock = clock
        self._random = random
        self._settings = settings or RetrySettings()
        self._stop = stop
        self.retries = 0  # so far

    def put_new(self, key: str, data: Buffer) -> bool:
        return self._retried(lambda: self._objects.put_new(key, data))

    def read(self, key: str, start: int, end: int) -> bytes:
        return self._retried(lambda: self._objects.read(key, start, end))

    def size(self, key: str) -> int | None:
        return self._retried(lambda: self._objects.size(key))

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        # In one attempt: a listing that failed half-way would repeat what it yielded.
        yield from self._retried(lambda: list(self._objects.listed(prefix)))

    def folders(self) -> list[str]:
        return self._retried(self._objects.folders)

    def delete(self, key: str) -> None:
        self._retried(lambda: self._objects.delete(key))

    def _retried(self, act: Callable[[], T]) -> T:
        settings = self._settings
        retries = Retries(
            self._clock,
            self._clock.monotonic_s() + settings.timeout_s,
            pause_s=settings.pause_s,
            pause_s_max=settings.pause_s_max,
            stop=self._stop,
            random=self._random,
        )
        for attempt in range(1, settings.attempts_max + 1):
            try:
                return act()
            except NetworkFailure as error:
                if attempt == settings.attempts_max or not retries.again():
                    raise ArchiveUnavailable(f"{error} (tried {attempt} times)") from None
                self.retries += 1
        raise AssertionError("an attempt returns or raises")
