from queue_scenario import *

from penstock.testing import *


def test_a():
    print(explore(QueueScenario()))


def test_b():
    print(explore(StoreScenario()))
