"""One Spark session for all of these tests: starting one takes longer than most of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.spark
from penstock.store.store import Store

# A JVM that lives for minutes gains nothing from its second compiler, and shares two cores with the Python processes.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# As if the package of a kind that Penstock does not know were installed, also for Spark's Python workers.
ACCOUNTS = str(Path(__file__).parents[1] / "contract" / "accounts_package")
CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"
WORKERS = str(Path(__file__).with_name("workers"))  # loads their modules before they are forked
os.environ["PYTHONPATH"] = ":".join(filter(None, (WORKERS, os.environ.get("PYTHONPATH"), ACCOUNTS)))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    session = penstock.spark.session(
        "tests",
        master="local[2,2]",
        spark__sql__shuffle__partitions="2",
        # Few rows: code for each plan would cost more than it saves.
        spark__sql__codegen__wholeStage="false",
        spark__sql__codegen__factoryMode="NO_CODEGEN",
        # Spark's other one starts a process, `readlink` or `chmod`, for each operation on a local checkpoint.
        spark__sql__streaming__checkpointFileManagerClass=f"{CHECKPOINTING}.FileSystemBasedCheckpointFileManager",
    )
    yield session
    session.stop()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(folder: str) -> Iterator[Store]:
    with penstock.open(folder) as opened:
        yield opened
