"""Coverage-guided fuzzing of one target; `make crash` runs each of them for a while.

fuzz.py --list              the names of the targets
fuzz.py NAME [-options]     fuzz one, with options of libFuzzer: -max_total_time=60 -artifact_prefix=tests/fuzz/
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from fuzz_targets import TARGETS


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        print(*TARGETS)
        return
    target = TARGETS[sys.argv[1]]

    def one(data: bytes) -> None:
        target.one(data)  # whether it was accepted is of no interest here

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], "-timeout=20", "-rss_limit_mb=4096", "-max_len=16384", *sys.argv[2:], corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
