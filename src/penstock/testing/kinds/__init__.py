"""The contract suite for kinds of tables, Penstock's own and those of other packages. It runs under pytest:

    class TestGraph(KindContract):
        sample = KindSample(kind=GraphKind(), write=..., rows=..., expected=..., sections=..., refused=...)

    sample      what the author of a kind provides to the suite
    contract    what every kind must pass; `KindContract` is the whole suite
    abilities   the part for each capability, skipped where a kind lacks it
    accounts    a toy kind, as an example and to test the suite

The kind must be registered: see `penstock.registry`.
"""

from penstock.testing.kinds.contract import KindContract
from penstock.testing.kinds.sample import KindSample, QuerySample

__all__ = ["KindContract", "KindSample", "QuerySample"]
