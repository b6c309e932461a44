"""The contract of a kind of table, for kinds of Penstock's own and of other packages. It runs under pytest:

    class TestGraph(KindContract):
        sample = KindSample(kind=GraphKind(), write=..., rows=..., expected=..., sections=..., refused=...)

    sample      what the author of a kind tells the suite about it
    contract    what every kind must pass; `KindContract` has all of it
    abilities   the part for each capability, skipped where a kind lacks it
    accounts    a toy kind, as an example and to try the suite on

The kind must be registered: see `penstock.registry`.
"""

from penstock.testing.kinds.contract import KindContract
from penstock.testing.kinds.sample import KindSample, QuerySample

__all__ = ["KindContract", "KindSample", "QuerySample"]
