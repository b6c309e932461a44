"""Programs that show Penstock at work: `python -m examples.NAME [FOLDER]`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def run(main: Callable[[Any, str], object]) -> None:
    """Run an example on a session of its own, in the folder of the command line or in a temporary one."""
    import penstock.spark

    with tempfile.TemporaryDirectory() as spare:
        spark = penstock.spark.session()
        main(spark, os.path.abspath(sys.argv[1]) if sys.argv[1:] else f"{spare}/store")
        spark.stop()
