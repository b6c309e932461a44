"""Draws the rounds of a campaign from its seed: who works on the store, what fails, who is killed."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from faults.shim import Rule

ROUNDS_PER_STORE = 8
ACTORS = ("p", "o", "u", "v")

# What can fail, and about how many such calls there are in a round.
CALLS: dict[tuple[str, str], int] = {
    ("fsync", "journal"): 25,
    ("fsync", "sstable"): 10,
    ("fsync", "queue"): 40,
    ("fsync", "qmft"): 40,
    ("fsync", "manifest"): 3,
    ("fsync", "spill"): 20,
    ("fsync", "staged"): 4,
    ("fsync", "folder"): 50,
    ("fsync", "store"): 20,
    ("fdatasync", "journal"): 80,
    ("fdatasync", "queue"): 15,
    ("fdatasync", "manifest"): 35,
    ("fdatasync", "spill"): 10,
    ("pwrite", "journal"): 100,
    ("pwrite", "sstable"): 10,
    ("pwrite", "queue"): 75,
    ("pwrite", "qmft"): 40,
    ("pwrite", "manifest"): 90,
    ("pwrite", "spill"): 25,
    ("pwrite", "staged"): 2,
    ("pwrite", "store"): 2,
    ("ftruncate", "journal"): 7,
    ("ftruncate", "queue"): 12,
    ("ftruncate", "qmft"): 15,
    ("ftruncate", "manifest"): 3,
    ("ftruncate", "spill"): 7,
    ("fallocate", "journal"): 30,
    ("fallocate", "queue"): 38,
    ("fallocate", "spill"): 8,
    ("rename", "journal"): 6,
    ("rename", "sstable"): 8,
    ("rename", "qmft"): 8,
    ("rename", "manifest"): 2,
    ("rename", "spill"): 5,
    ("rename", "staged"): 2,
    ("rename", "folder"): 3,
    ("unlink", "journal"): 4,
    ("unlink", "queue"): 4,
    ("unlink", "qmft"): 10,
    ("unlink", "spill"): 3,
    ("create", "journal"): 6,
    ("create", "sstable"): 8,
    ("create", "queue"): 10,
    ("create", "qmft"): 10,
    ("create", "manifest"): 4,
    ("create", "spill"): 5,
    ("create", "staged"): 2,
    ("create", "store"): 2,
    ("open", "journal"): 50,
    ("open", "sstable"): 20,
    ("open", "queue"): 30,
    ("open", "qmft"): 30,
    ("open", "spill"): 50,
    ("open", "staged"): 8,
    ("open", "folder"): 50,
    ("mkdir", "queue"): 8,
    ("mkdir", "spill"): 5,
    ("mkdir", "folder"): 10,
}
MAKING = (
    ("pwrite", "store"),
    ("create", "store"),
    ("create", "manifest"),
    ("ftruncate", "manifest"),
    ("mkdir", "folder"),
)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


@dataclass(frozen=True)
class Round:
    """One round: a few processes, some faults, perhaps a kill; then all is looked at."""

    number: int
    seed: str
    mode: str  # "owner", "served" (an owner and clients) or "detached" (clients alone)
    rules: tuple[Rule, ...]
    steps: int
    owner_kill_s: float | None
    client_kill_s: float | None
    ending: str
    faults_at_open: bool
    compacts: bool
    kills_reader: bool


def draw_rounds(seed: int, numbers: Iterable[int]) -> Iterator[Round]:
    """Rounds by number."""
    return (draw_round(seed, number) for number in numbers)


def draw_round(seed: int, number: int) -> Round:
    """The same for the same seed and number."""
    chance = random.Random(f"{seed}:{number}")
    mode = chance.choices(["owner", "served", "detached"], [14, 4, 2])[0]
    rules = [_draw_fault(chance, *_draw_call(chance)) for _ in range(chance.randrange(2, 7))]
    kill = chance.choices(["point", "time", "end", "none"], [5, 3, 1, 3])[0]
    if kill == "point":
        rules += [_draw_kill(chance) for _ in range(3)]
    after_s = chance.uniform(0.0, 0.6) if kill == "time" else None
    kills_client = mode != "owner" and chance.random() < 0.3
    makes_store = number % ROUNDS_PER_STORE == 0  # some calls are made then, and never again
    if makes_store:
        making = random.Random(f"{seed}:{number}:making")
        rules.append(_draw_fault(making, *making.choice(MAKING), making.randrange(1, 3)))
    return Round(
        number=number,
        seed=f"{seed}:{number}",
        mode=mode,
        rules=tuple(rules),
        steps=chance.randrange(30, 90) if mode == "owner" else chance.randrange(15, 40),
        owner_kill_s=None if kills_client else after_s,
        client_kill_s=after_s if kills_client else None,
        ending="kill" if kill == "end" else chance.choice(["heal", "heal", "close"]),
        faults_at_open=chance.random() < 0.3 or makes_store,
        compacts=chance.random() < 0.15,
        kills_reader=chance.random() < 0.1,
    )


def _draw_call(chance: random.Random) -> tuple[str, str, int]:
    (call, component), count = chance.choice(list(CALLS.items()))
    return call, component, 1 + min(int(chance.expovariate(2.0 / count)), 2 * count)


def _draw_fault(chance: random.Random, call: str, component: str, after: int) -> Rule:
    times = chance.choices([1, chance.randrange(2, 6), 200], [12, 3, 1])[0]
    if call == "pwrite" and chance.random() < 0.25:
        return Rule(call, component, "short", after=after, times=times)
    mode = "fail"
    if call == "pwrite" and chance.random() < 0.4:
        mode = "half"
    if call in ("fsync", "fdatasync") and chance.random() < 0.5:
        mode = "lost"
    error = errno.EMFILE if call == "open" else chance.choice(ERRORS if call == "create" else ERRORS[:2])
    return Rule(call, component, mode, error, after, times)


def _draw_kill(chance: random.Random) -> Rule:
    call, component, after = _draw_call(chance)
    mode = chance.choice(["kill", "kill half", "kill lost"])
    return Rule(call, component, mode, chance.choice([0, 1 + chance.randrange(1 << 30)]), after)
