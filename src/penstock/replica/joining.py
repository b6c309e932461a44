"""How a member with a new disk becomes one that votes.

A member that lost its disk forgot what it acknowledged and whom it voted for. If it voted at once, it could help to
elect a leader that lacks an entry which a quorum, its earlier life included, once had. So a new disk is `JOINING`: it
takes entries, and acknowledges what it has synced, but neither votes nor stands. Each disk has a *life*, a random
number, and asks the others (`StateInquiry`); what they answer (`StateReport`) decides:

  birth       all others are new, too. Nothing was ever acknowledged. One of them may be a store that began alone
              (`FOUNDER`): then nobody votes for a member without entries, so that the founder leads first.
  counted     a member founded the cluster with this very life: it has forgotten nothing.
  adoption    a quorum of members answered. No earlier life can have voted in, or acknowledged entries of, a term above
              the highest of their terms. It takes that term, without a vote in it. When it then has all entries that a
              leader of that term or a later one had when it answered, it has all it can ever have acknowledged.

With a quorum of new disks and some data elsewhere none of the three comes about: nobody can know what was lost, and the
members wait for the operator.

Thread: the loop's.
Invariant: a member that has standing `MEMBER` has every entry that any of its lives acknowledged, except entries of its
present life that were cut because they conflict.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.replica.messages import StateReport
from penstock.replica.state import FOUNDER, JOINING, MEMBER

__all__ = ["FOUNDER", "FRESH", "JOINING", "MEMBER", "NO_VOTE", "Joining"]

FRESH = 3  # in answers: joining, with nothing in its log
NO_VOTE = ""  # the vote of a term in which an earlier life may have voted: for nobody


class Joining:
    """What a member with a new disk knows of the others."""

    def __init__(self, others: Sequence[str], life: int) -> None:
        self._others, self._life = tuple(others), life
        self._quorum = (len(others) + 1) // 2 + 1
        self._answers: dict[str, StateReport] = {}  # the newest of each member
        self._first: dict[int, tuple[str, int]] = {}  # by term: its leader, and its last entry when it answered first
        self.adopted = False  # its term is above those of its earlier lives

    def take(self, member: str, answer: StateReport) -> None:
        """Note an answer; one to an earlier life is ignored."""
        if answer.to_life == self._life:
            self._answers[member] = answer
            if answer.leads:
                self._first.setdefault(answer.term, (member, answer.last_index))

    def founders(self, *, is_founder: bool) -> tuple[tuple[str, int], ...] | None:
        """Return the lives that found the cluster; None if it exists already, or a member has not answered."""
        answers = self._answers
        if len(answers) == len(self._others) and all(
            answer.standing in (FRESH, FOUNDER) for answer in answers.values()
        ):
            if sum(answer.standing == FOUNDER for answer in answers.values()) + is_founder > 1:
                return None
            return tuple(sorted((name, answer.life) for name, answer in answers.items()))
        return None

    def has_founder(self) -> bool:
        """Whether a member brought a store when the cluster began."""
        return any(answer.founded or answer.standing == FOUNDER for answer in self._answers.values())

    def counted_by(self, member: str) -> tuple[tuple[str, int], ...] | None:
        """Return the lives that founded the cluster with this one, if the answer of a member says so."""
        answer = self._answers.get(member)
        return None if answer is None or self._life not in {life for _, life in answer.born} else answer.born

    def term_to_adopt(self) -> int | None:
        """Return the highest term that an earlier life can have voted in; None if too few members answered."""
        terms = [answer.term for answer in self._answers.values() if answer.standing == MEMBER]
        return max(terms) if len(terms) >= self._quorum else None

    def needs(self, leader: str | None, term: int) -> int | None:
        """Return the last entry of its leader that this member must have; None before the leader has answered."""
        member, last = self._first.get(term, (None, 0))
        return last if self.adopted and leader is not None and member == leader else None
