"""The memo of a whole prompt: in which slot the tail keeps the last row's logits, and for which prompts.

Decides which slot a prompt's logits go to: the one used longest ago. The table is part of every replica of the ledger,
so whoever samples from a slot and whoever checks it mean the same prompt. Pure bookkeeping; it holds no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.frames import MOST_MEMOS, NO_ROOT, NodeId
from coordinator.prefixes import digest_of


class MemoTable:
    """The digest of the prompt, and of its root, whose last row's logits lie in each slot."""

    def __init__(self) -> None:
        self.slots = MOST_MEMOS  # how many there are; stages before the tail need not know
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def keep(self, slot: int, prompt: Sequence[int], root: NodeId = NO_ROOT) -> None:
        if slot < self.slots:
            self._digests[slot] = digest_of(prompt, root)

    def holds(self, slot: int, prompt: Sequence[int], root: NodeId = NO_ROOT) -> bool:
        return self._digests.get(slot) == digest_of(prompt, root)

    def drop(self, slot: int) -> None:
        self._digests.pop(slot, None)

    def find(self, prompt: Sequence[int], root: NodeId = NO_ROOT) -> int | None:
        digest = digest_of(prompt, root)
        return next((slot for slot, known in self._digests.items() if known == digest), None)

    @property
    def known(self) -> frozenset[tuple[int, bytes]]:
        """Slots and digests, to compare replicas by."""
        return frozenset(self._digests.items())

    def clear(self) -> None:
        self._digests.clear()


class MemoSlots:
    """The coordinator's choice of slots. One frame keeps at most a prompt a lane, and what it recalls was touched just
    before: with more slots than lanes, no slot is overwritten between a choice and its frame.
    """

    def __init__(self, table: MemoTable, slots: int, lanes: int) -> None:
        self._table = table
        # The least recently used first.
        self._order = list(range(slots)) if slots > lanes else []

    def recall(self, prompt: Sequence[int], root: NodeId = NO_ROOT) -> int | None:
        """The slot that holds the prompt's last logits, if one does. It becomes the latest used."""
        slot = self._table.find(prompt, root) if self._order else None
        if slot is not None:
            self._touch(slot)
        return slot

    def choose(self, prompt: Sequence[int], root: NodeId = NO_ROOT) -> int | None:
        """The slot that the prompt's logits are to be kept in; None where none are kept."""
        if not self._order:
            return None
        known = self._table.find(prompt, root)
        slot = self._order[0] if known is None else known
        self._touch(slot)
        return slot

    def _touch(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.append(slot)
