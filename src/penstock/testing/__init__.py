"""What Penstock's own tests stand on, shipped for the tests of others.

`SimulatedDisk` is a strict in-memory file system, `explore` runs a scenario through every crash and fault, `FakeClock`
is time you move by hand. Nothing in Penstock imports this package.
"""

from penstock.testing.clock import FakeClock
from penstock.testing.crashes import Faults, History, Report, Scenario, Violation, explore
from penstock.testing.disk import Fault, SimulatedDisk

__all__ = [
    "FakeClock",
    "Fault",
    "Faults",
    "History",
    "Report",
    "Scenario",
    "SimulatedDisk",
    "Violation",
    "explore",
]
