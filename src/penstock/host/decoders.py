"""Decoders of MessagePack, one for each type, made by one thread at a time.

msgspec lets a thread see the fields of a class that another thread is still collecting, and then ends the process
(SIGSEGV in 1 of 30 trials with four threads). Decoders of modules are made when these are imported; those whose type is
known only at the call come from here.

Thread: any; `_making` guards the first decoder of a type.
Invariant: nobody gets a decoder before it is complete.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.host import threads

T = TypeVar("T")

_making = threads.lock("host.decoders")
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}  # written under _making


def decoder_of(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder of a type."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders.get(kind)
            if decoder is None:
                decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return decoder
