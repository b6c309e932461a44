"""The fuzz targets without a fuzzer: good bytes are accepted, and a few thousand broken ones break nothing else."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from fuzz_targets import TARGETS

from penstock.queue.coding import PREFIX

MUTATIONS = 2_000  # of each target
MEMORY_TIMES_MAX, MEMORY_CONSTANT = 64, 2 << 20  # a few copies, and objects for each byte
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1]


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Good bytes with one to four things wrong."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at % len(data)] = chance.randrange(256)
            case 2:
                del data[at : at + chance.randint(1, 16)]
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 16))
            case 4:
                other = chance.choice(seeds)
                start = chance.randrange(len(other) + 1)
                data[at:at] = other[start : start + chance.randint(1, 64)]
            case 5:
                del data[at:]
            case 6:
                code = chance.choice("BHIQ")
                bits = 8 * struct.calcsize(code)
                number = struct.pack(chance.choice("<>") + code, chance.choice(NUMBERS) & ((1 << bits) - 1))
                data[at : at + len(number)] = number
            case _:
                data += bytes(chance.randint(1, 64))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_good_bytes_are_accepted(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert seeds
    for seed in seeds:
        assert TARGETS[name].one(seed), f"{seed!r} is not accepted"
    assert TARGETS[name].one(b"") in (False, True)


def test_a_container_that_says_it_is_encrypted_is_refused() -> None:
    seed = TARGETS["container"].seeds()[0]
    assert not TARGETS["container"].one(seed[:11] + b"\1" + seed[12:])  # found by a campaign: no key is there


def search(name: str) -> None:
    """Put broken bytes into a target; `TargetFailed` if it makes something of them that it must not."""
    target, chance = TARGETS[name], random.Random(f"{name}/1")
    seeds, accepted = target.seeds(), 0
    for _ in range(MUTATIONS):
        data = mutated(chance, seeds)
        try:
            accepted += target.one(data)
        except Exception as error:
            raise TargetFailed(f"{error!r} for {data!r}") from error
    assert 0 < accepted < MUTATIONS  # otherwise the mutations are too wild, or too tame, to find anything


class TargetFailed(AssertionError):
    """Bytes that break a target."""


@pytest.mark.parametrize("name", TARGETS)
def test_broken_bytes_are_refused_in_words(name: str) -> None:
    search(name)


NEVER = ZeroDivisionError  # in the place of an error that is caught: that one gets through


@pytest.mark.parametrize(
    ("name", "where", "bug"),
    [
        ("wire", "penstock.protocol.wire.codec._decode", lambda body, decoder: decoder.decode(body)),
        ("wire", "penstock.protocol.wire.codec.UnicodeDecodeError", NEVER),
        ("kv_section", "penstock.kv.section._cut", lambda payload, sizes, at: ([b""] * len(sizes), at + sum(sizes))),
        ("queue_section", "penstock.queue.validation._check_body", lambda body: PREFIX.unpack_from(body[8:])),
        ("condition", "penstock.queue.validation.check_condition", lambda *_, **__: None),
        ("condition", "penstock.partition.ledger_records.UnicodeDecodeError", NEVER),
        ("reference", "penstock.partition.reference.UnicodeDecodeError", NEVER),
        ("sstable_index", "penstock.lsm.index.Index._check_head", lambda self, *_: None),
        ("qmft", "penstock.queue.qmft._check_path", lambda path: path.encode("ascii")),
        ("manifest_record", "penstock.manifest.codec.UnicodeDecodeError", NEVER),
        ("backup_listing", "penstock.store.backup_folder.UnicodeDecodeError", NEVER),
        ("partition_snapshot", "penstock.partition.snapshot_folder.UnicodeDecodeError", NEVER),
        ("member_message", "penstock.replica.messages.UnicodeDecodeError", NEVER),
    ],
)
def test_a_seeded_bug_is_found(name: str, where: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same bytes in which the test above finds nothing."""
    monkeypatch.setattr(where, bug, raising=False)
    with pytest.raises(TargetFailed):
        search(name)


@pytest.mark.parametrize("name", TARGETS)
def test_broken_bytes_take_little_memory(name: str) -> None:
    target, chance = TARGETS[name], random.Random(f"{name}/2")
    seeds = target.seeds()
    target.one(seeds[0])  # what is made once
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS // 20):
            data = mutated(chance, seeds)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            target.one(data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MEMORY_TIMES_MAX * len(data) + MEMORY_CONSTANT, data
    finally:
        tracemalloc.stop()
