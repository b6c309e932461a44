"""What pyarrow imports at its first conversions, imported before them.

Where pandas is installed, pyarrow imports it in the middle of a conversion, from C++ code that drops whatever the
import raises: a Ctrl-C at that moment would be lost. So a thread that signals interrupt calls `load_pandas` first,
which imports in another thread and can be interrupted.

Thread: any.
"""

from __future__ import annotations

import importlib
import sys

from penstock.host import threads

pandas_is_loaded: list[bool] = []  # not empty once it is, or is known not to be installed


def load_pandas() -> None:
    """Import pandas, if it is installed, as pyarrow would at its next conversion."""
    if not pandas_is_loaded:
        threads.run_interruptible(_load)


def _load() -> None:
    if sys.modules.get("pandas", "") is not None:  # None hides it from an import, which pyarrow does not expect
        arrow = importlib.import_module("pyarrow")
        arrow.array([b""]).to_numpy(zero_copy_only=False)
    pandas_is_loaded.append(True)
