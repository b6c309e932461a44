"""Programs that show Penstock at work: `python -m examples.NAME [FOLDER]`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any


def _tell_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End in one line on Ctrl-C, also while modules are imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # so it is while `python -m examples.NAME` imports this: a test may import it, too
    sys.excepthook = _tell_in_one_line


def run(main: Callable[[Any, str], object]) -> None:
    """Run an example on a session of its own, in the folder of the command line or in a temporary one."""
    import penstock.spark

    with tempfile.TemporaryDirectory() as spare:
        spark = penstock.spark.session()
        main(spark, os.path.abspath(sys.argv[1]) if sys.argv[1:] else f"{spare}/store")
        spark.stop()
