"""The server: what an owner does for other processes. `penstock.open` is in `opening`."""
