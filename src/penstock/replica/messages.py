"""What members send each other: ten messages, as msgpack with a type tag. Nothing in them is ever run or unpickled.

Thread: pure functions.
Invariant: what `unpack` returns has the right types and an order of entries that a correct member could have sent.
"""

from __future__ import annotations

import msgspec

from penstock.errors import Invalid
from penstock.replica.raft_log import NO_OP, Command, RaftEntry

MESSAGE_BYTES_MAX = 300 << 20  # the largest record and its frame
INDEX_MAX = (1 << 63) - 1


class _MemberMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    term: int


class RequestVote(_MemberMessage, frozen=True):
    """A candidate asks for a vote."""

    last_index: int
    last_term: int


class Vote(_MemberMessage, frozen=True):
    """The vote, given in this term."""


class Append(_MemberMessage, frozen=True):
    """A leader sends entries that follow an entry; without entries it is a heartbeat."""

    previous_index: int
    previous_term: int
    committed: int
    needed: int = 0  # entries below this index are on every member
    entries: tuple[tuple[int, bytes | None], ...] = ()  # term, and the record; None: an entry of the members themselves
    time_us: int = 0  # the time of the leader's store; 0: it is not known yet


class Appended(_MemberMessage, frozen=True):
    """A follower's answer: the next index it wants, and whether it has all before it."""

    next_index: int
    success: bool
    reset: bool
    full: bool = False  # its disk has no room for more writes: it need not lead


class NewerTerm(_MemberMessage, frozen=True):
    """The answer to a message of an old term: a leader that was replaced steps down when it gets this."""


class PreVote(_MemberMessage, frozen=True):
    """A member whose leader is silent asks whether it would be elected, before it begins a term (a pre-vote)."""

    last_index: int
    last_term: int
    attempt: int


class PreVoteGranted(_MemberMessage, frozen=True):
    """The answer to `PreVote`: this member would vote for it."""

    attempt: int


class NeedSnapshot(_MemberMessage, frozen=True):
    """A leader's log begins after this entry: a follower that lacks it must take a snapshot of the leader's store."""

    base_index: int
    base_term: int


class StateInquiry(_MemberMessage, frozen=True):
    """A member with a new disk asks the others for their states: see `joining`."""

    life: int


class StateReport(_MemberMessage, frozen=True):
    """The answer to `StateInquiry`."""

    to_life: int  # the life that asked
    life: int
    standing: int  # of the member that answers: see `joining`
    leads: bool
    last_index: int
    born: tuple[tuple[str, int], ...] = ()  # the lives that founded the cluster with it
    founded: bool = False  # one of them brought a store


Message = (
    RequestVote
    | Vote
    | Append
    | Appended
    | NewerTerm
    | PreVote
    | PreVoteGranted
    | NeedSnapshot
    | StateInquiry
    | StateReport
)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Encode a message."""
    return _encode(message)


def unpack(data: bytes) -> Message:
    """Decode a message; `Invalid` if no member can have sent it."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise Invalid(f"a member sent a message of {len(data)} bytes: at most {MESSAGE_BYTES_MAX} are allowed")
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"a member sent a message that does not decode ({error})") from None
    numbers = [message.term]
    if isinstance(message, RequestVote | PreVote):
        numbers += [message.last_index, message.last_term]
    elif isinstance(message, NeedSnapshot):
        numbers += [message.base_index, message.base_term]
    elif isinstance(message, StateReport):
        numbers.append(message.last_index)
    elif isinstance(message, Appended):
        numbers.append(message.next_index)
    elif isinstance(message, Append):
        numbers += [message.previous_index, message.previous_term, message.committed, message.needed, message.time_us]
        terms = [message.previous_term, *(term for term, _ in message.entries), message.term]
        if terms != sorted(terms):
            raise Invalid(f"a member sent entries whose terms do not ascend: {terms[:8]}")
    if not all(0 <= number <= INDEX_MAX for number in numbers):
        raise Invalid(f"a member sent a number that is out of range: {numbers}")
    return message


def sent_entries(entries: list[RaftEntry]) -> tuple[tuple[int, bytes | None], ...]:
    """Return entries as a message carries them."""
    return tuple((term, command.body if isinstance(command, Command) else None) for command, _, term in entries)


def received_entries(message: Append) -> list[RaftEntry]:
    """Return the entries of a message, with their indexes."""
    return [
        RaftEntry(NO_OP if body is None else Command(body), index, term)
        for index, (term, body) in enumerate(message.entries, message.previous_index + 1)
    ]
