"""`python -m penstock`: the command `penstock`, where its script is not on the PATH."""

from __future__ import annotations

from penstock.cli import main

if __name__ == "__main__":
    main()
