"""The machine under Penstock: files, time and randomness, each behind a small protocol.

Everything that touches the operating system's files, its clocks or its entropy is in this package. The rest of
Penstock gets these passed in, which is what makes it testable against crashes (`penstock.testing`).
"""
