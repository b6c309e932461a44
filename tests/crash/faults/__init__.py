"""A campaign against stores of real processes: system calls fail, processes are killed, a model says what must be left.

The parts: `shim` (and shim.c) makes system calls fail; `plan` draws rounds from a seed; `process` runs owners, clients
and readers in processes of their own; `actor` is what those do; `history` is what they write down of it; `model` says
what the store must hold then, `moment` what any single moment of it must; `campaign` runs the rounds and counts.
"""
