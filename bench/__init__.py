"""Benchmarks: Penstock and its peers in one run, as figures and ratios. No test asserts a time."""
