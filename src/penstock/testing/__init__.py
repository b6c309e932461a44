"""The tools of Penstock's own tests, shipped for the tests of other packages.

`SimulatedDisk` is a strict in-memory file system, `explore` runs a scenario through every crash and fault, `FakeClock`
is a clock that a test moves. Nothing in Penstock imports this package.

    crashes     `explore`: a scenario through every crash, every crash of recovery, and every fault
    disk        `SimulatedDisk`: what each file operation does, and the faults it can inject
    disk_files  the files, folders and locks of a simulated disk
    disk_image  what a crash can leave of a simulated disk
    manifest    the manifest's engine on a simulated disk
    clock       `FakeClock`
    locks       finds locks that threads take in orders that can deadlock
    network     members of a cluster on simulated disks and a simulated network, in one thread
    members     a real cluster in this process, on loopback
    contracts   suites for implementations of Penstock's protocols
    kinds       the suite for kinds of tables
"""

from penstock.testing.clock import FakeClock
from penstock.testing.crashes import CrashReport, Faults, History, Scenario, SearchBudget, Violation, explore
from penstock.testing.disk import Fault, SimulatedDisk

__all__ = [
    "CrashReport",
    "FakeClock",
    "Fault",
    "Faults",
    "History",
    "Scenario",
    "SearchBudget",
    "SimulatedDisk",
    "Violation",
    "explore",
]


def __dir__() -> list[str]:
    return sorted(__all__)
