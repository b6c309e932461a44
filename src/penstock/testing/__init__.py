"""The tools of Penstock's own tests, shipped for the tests of other packages.

`SimulatedDisk` is a strict in-memory file system, `explore` runs a scenario through every crash and fault, `FakeClock`
is a clock that a test moves. Nothing in Penstock imports this package.
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
