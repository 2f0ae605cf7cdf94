"""The page allocator: which physical page holds which 128 positions of which slot.

Bookkeeping only: no arrays of a device, no policy about who runs. The executor owns one and turns
`take_updates` into writes of its block table. Rules of reservation and headroom:

- a newcomer reserves pages for all of its known tokens plus one page, so that it never fails for
  lack of a page it was entitled to;
- before that, every decoding lane is topped up to one page beyond its length, all or none;
- before a decode step every lane in it gets the page of its next position, all or none;
- no lane ever holds more pages than its longest possible sequence needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ds4jax.config import PAGE_TOKENS


class PageError(RuntimeError):
    """The books do not balance: a bug, never the consequence of a request."""


def pages_for(tokens: int) -> int:
    """Pages that cover positions 0..tokens-1."""
    return -(-tokens // PAGE_TOKENS)


@dataclass
class _Lane:
    length: int  # positions written or dispatched for writing
    max_rows: int  # positions it may ever write
    decoding: bool = False
    suspended: bool = False
    pages: list[int] = field(default_factory=list)

    def wanted(self, ahead: int) -> int:
        """Pages that cover `ahead` positions more than the length, within the lane's bound."""
        return pages_for(min(self.length + ahead, self.max_rows))


class PageAllocator:
    """Pages of one pool, handed to slots.

    Args:
        num_pages: physical pages; page number `num_pages` is the trash page and never handed out.
        num_slots: slots, each with at most one lane.
        pages_per_slot: entries of a slot's block table.
        order: order in which free pages are first handed out (a permutation of 0..num_pages-1;
            ascending if None). Nothing a lane computes may depend on it.

    Raises:
        ValueError: sizes below 1, or an `order` that is no permutation.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        pages_per_slot: int,
        order: Sequence[int] | None = None,
    ) -> None:
        if min(num_pages, num_slots, pages_per_slot) < 1:
            raise ValueError(f"{num_pages=}, {num_slots=}, {pages_per_slot=} must be at least 1")
        order = range(num_pages) if order is None else order
        if sorted(order) != list(range(num_pages)):
            raise ValueError(f"order must be a permutation of 0..{num_pages - 1}")
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.pages_per_slot = pages_per_slot
        self._free = list(reversed(order))
        self._lanes: dict[int, _Lane] = {}
        self._updates: dict[tuple[int, int], int] = {}

    @property
    def trash(self) -> int:
        """Where empty table entries point and masked writes go."""
        return self.num_pages

    @property
    def free(self) -> int:
        """Pages owned by nobody."""
        return len(self._free)

    def owned(self, slot: int) -> tuple[int, ...]:
        """Pages of `slot` in order of position; empty if it has no lane."""
        lane = self._lanes.get(slot)
        return tuple(lane.pages) if lane else ()

    def length(self, slot: int) -> int:
        """Positions of `slot` written so far."""
        return self._lane(slot).length

    def fits_ever(self, max_rows: int) -> bool:
        """Whether a lane of `max_rows` positions could run alone."""
        return pages_for(max_rows) <= min(self.num_pages, self.pages_per_slot)

    def open(
        self, slot: int, known: int, max_rows: int, *, length: int = 0, decoding: bool = False
    ) -> bool:
        """Reserve pages for `known` positions plus one page of headroom; False if they lack now.

        `length` and `decoding` are those of a lane that comes back with its content.

        Raises:
            PageError: the slot is taken, or the lane can never fit.
        """
        if slot in self._lanes or not 0 <= slot < self.num_slots:
            raise PageError(f"slot {slot} is taken or not in 0..{self.num_slots - 1}")
        if not self.fits_ever(max_rows):
            raise PageError(
                f"{max_rows} positions need {pages_for(max_rows)} pages, more than the pool"
                f" ({self.num_pages}) or a table ({self.pages_per_slot})"
            )
        if not self._grow(self._decoders(), PAGE_TOKENS):
            return False
        lane = _Lane(length=max(known, length), max_rows=max_rows)
        if lane.wanted(PAGE_TOKENS) > self.free:
            return False
        self._lanes[slot] = lane
        self._grow([slot], PAGE_TOKENS)
        lane.length, lane.decoding = length, decoding
        return True

    def advance(self, slot: int, length: int, *, decoding: bool) -> None:
        """Record that positions below `length` are written (or dispatched for writing).

        Raises:
            PageError: the length shrinks, or the slot does not own the pages.
        """
        lane = self._lane(slot)
        if length < lane.length or pages_for(length) > len(lane.pages):
            raise PageError(
                f"slot {slot} cannot go from {lane.length} to {length} positions with"
                f" {len(lane.pages)} pages"
            )
        lane.length, lane.decoding = length, decoding

    def top_up(self, slots: Iterable[int], rows: int = 1) -> int:
        """Pages for the next `rows` positions of each slot, all or none; then headroom.

        Returns: pages lacking; above 0 nothing was changed.
        """
        chosen = list(slots)
        if rows <= PAGE_TOKENS and not self._need(chosen, PAGE_TOKENS):
            return 0  # as nearly always: headroom is there already
        lacking = self._need(chosen, rows) - self.free
        if lacking > 0:
            return lacking
        self._grow(chosen, rows)
        self._grow(chosen, PAGE_TOKENS)
        return 0

    def suspend(self, slot: int, suspended: bool) -> None:
        """A suspended lane keeps its pages and is not topped up."""
        self._lane(slot).suspended = suspended

    def close(self, slot: int) -> None:
        """Return all pages of `slot` and point its table at the trash page."""
        lane = self._lane(slot)
        for index in range(len(lane.pages)):
            self._updates[slot, index] = self.trash
        self._free.extend(reversed(lane.pages))
        del self._lanes[slot]

    def reset(self) -> None:
        """Close every lane."""
        for slot in list(self._lanes):
            self.close(slot)

    def take_updates(self) -> list[tuple[int, int, int]]:
        """(slot, table index, page) for every entry changed since the last call."""
        out = [(slot, index, page) for (slot, index), page in self._updates.items()]
        self._updates.clear()
        return out

    def check(self) -> None:
        """Every page is free or owned by one lane; every lane owns the pages of its length.

        Raises:
            PageError: naming what is wrong.
        """
        seen = list(self._free)
        for slot, lane in self._lanes.items():
            seen += lane.pages
            if len(lane.pages) < pages_for(lane.length):
                raise PageError(f"slot {slot}: {lane.length} positions, {len(lane.pages)} pages")
            if len(lane.pages) > pages_for(lane.max_rows):
                raise PageError(f"slot {slot}: {len(lane.pages)} pages for {lane.max_rows} rows")
        if sorted(seen) != list(range(self.num_pages)):
            raise PageError(f"{len(seen)} pages free or owned, each of {self.num_pages} once")

    def _lane(self, slot: int) -> _Lane:
        if slot not in self._lanes:
            raise PageError(f"slot {slot} holds no lane")
        return self._lanes[slot]

    def _decoders(self) -> list[int]:
        return [s for s, lane in self._lanes.items() if lane.decoding and not lane.suspended]

    def _need(self, slots: Iterable[int], ahead: int) -> int:
        lanes = [self._lane(s) for s in slots]
        return sum(max(0, lane.wanted(ahead) - len(lane.pages)) for lane in lanes)

    def _grow(self, slots: Sequence[int], ahead: int) -> bool:
        """Grow every lane to `ahead` positions beyond its length; all or none."""
        if self._need(slots, ahead) > self.free:
            return False
        for slot in slots:
            lane = self._lane(slot)
            for index in range(len(lane.pages), lane.wanted(ahead)):
                page = self._free.pop()
                lane.pages.append(page)
                self._updates[slot, index] = page
        return True
