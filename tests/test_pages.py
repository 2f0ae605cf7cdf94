"""Page allocator: reservation, headroom, ownership; a random walk against a simple model."""

from __future__ import annotations

import random

import pytest

from ds4jax.pages import PageAllocator, PageError, pages_for


def test_reservation_is_the_prompt_plus_one_page_and_never_more_than_the_lane_can_use() -> None:
    pages = PageAllocator(num_pages=10, num_slots=3, pages_per_slot=8)
    assert pages.open(0, known=129, max_rows=1000)
    assert len(pages.owned(0)) == 3  # 2 pages of prompt, 1 of headroom
    assert pages.open(1, known=5, max_rows=100)
    assert len(pages.owned(1)) == 1  # its longest sequence fits into one
    assert pages.free == 6
    pages.check()


def test_no_newcomer_while_a_decoder_lacks_its_headroom() -> None:
    pages = PageAllocator(num_pages=4, num_slots=3, pages_per_slot=4)
    assert pages.open(0, known=100, max_rows=500)  # 2 pages
    pages.advance(0, 100, decoding=True)
    pages.advance(0, 129, decoding=True)  # now the headroom is used up
    assert pages.open(1, known=10, max_rows=10)  # tops slot 0 up to 3, takes the fourth
    assert len(pages.owned(0)) == 3
    assert not pages.open(2, known=1, max_rows=1)
    pages.close(1)
    pages.advance(0, 257, decoding=True)
    assert not pages.open(1, known=10, max_rows=10)  # the last page is slot 0's headroom
    assert len(pages.owned(0)) == 4
    pages.check()


def test_top_up_is_all_or_none_and_prefers_the_next_position_to_headroom() -> None:
    pages = PageAllocator(num_pages=5, num_slots=2, pages_per_slot=5)
    for slot in (0, 1):
        assert pages.open(slot, known=128, max_rows=600)
    for slot in (0, 1):
        pages.advance(slot, 256, decoding=True)
    assert pages.top_up([0, 1]) == 1  # each needs a third page, one is free
    assert [len(pages.owned(s)) for s in (0, 1)] == [2, 2]
    assert pages.top_up([0]) == 0
    assert len(pages.owned(0)) == 3
    pages.close(1)
    assert pages.top_up([0]) == 0 and len(pages.owned(0)) == 3  # 256 + 128 positions: 3 pages


def test_suspended_lanes_are_not_topped_up() -> None:
    pages = PageAllocator(num_pages=4, num_slots=2, pages_per_slot=4)
    assert pages.open(0, known=128, max_rows=512)
    pages.advance(0, 256, decoding=True)
    pages.suspend(0, True)
    assert pages.open(1, known=1, max_rows=1)
    assert len(pages.owned(0)) == 2


def test_table_updates_replay_to_the_owned_pages() -> None:
    pages = PageAllocator(num_pages=6, num_slots=2, pages_per_slot=4, order=[3, 1, 5, 0, 2, 4])
    table = {(s, i): pages.trash for s in range(2) for i in range(4)}
    pages.open(0, known=200, max_rows=512)
    pages.open(1, known=1, max_rows=1)
    table.update({(s, i): p for s, i, p in pages.take_updates()})
    assert [table[0, i] for i in range(4)] == [3, 1, 5, pages.trash]
    assert table[1, 0] == 0
    pages.close(0)
    pages.open(0, known=1, max_rows=1)
    table.update({(s, i): p for s, i, p in pages.take_updates()})
    assert [table[0, i] for i in range(4)] == [*pages.owned(0), *[pages.trash] * 3]
    assert pages.take_updates() == []


def test_wrong_calls_are_refused() -> None:
    pages = PageAllocator(num_pages=2, num_slots=1, pages_per_slot=4)
    with pytest.raises(PageError, match="more than the pool"):
        pages.open(0, known=1, max_rows=257)
    assert not pages.fits_ever(257) and pages.fits_ever(256)
    with pytest.raises(PageError, match="holds no lane"):
        pages.close(0)
    assert pages.open(0, known=1, max_rows=256)
    with pytest.raises(PageError, match="taken"):
        pages.open(0, known=1, max_rows=1)
    with pytest.raises(PageError, match="cannot go from"):
        pages.advance(0, 257, decoding=True)
    with pytest.raises(ValueError, match="permutation"):
        PageAllocator(2, 1, 1, order=[0, 0])


def test_check_sees_a_lost_and_a_doubled_page() -> None:
    for damage in (lambda p: p._free.pop(), lambda p: p._free.append(p._free[0])):
        pages = PageAllocator(num_pages=4, num_slots=1, pages_per_slot=4)
        pages.check()
        damage(pages)
        with pytest.raises(PageError):
            pages.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    total, slots = rng.randint(1, 24), rng.randint(1, 6)
    pages = PageAllocator(total, slots, pages_per_slot=8)
    table = {(s, i): pages.trash for s in range(slots) for i in range(8)}
    live: dict[int, tuple[int, int]] = {}  # slot: (length, max_rows)
    for _ in range(400):
        slot = rng.randrange(slots)
        if slot not in live:
            rows = rng.randint(1, 1024)
            known = rng.randint(1, rows)
            if pages.fits_ever(rows) and pages.open(slot, known, rows):
                assert len(pages.owned(slot)) == pages_for(min(known + 128, rows))
                live[slot] = (0, rows)
                pages.advance(slot, known, decoding=True)  # entitled to it, whatever else runs
                live[slot] = (known, rows)
        elif rng.random() < 0.15:
            pages.close(slot)
            del live[slot]
        elif rng.random() < 0.1:
            pages.suspend(slot, rng.random() < 0.5)
        else:
            length, rows = live[slot]
            if length < rows and pages.top_up([slot]) == 0:
                length = min(rows, length + rng.choice([1, 1, 7]), 128 * len(pages.owned(slot)))
                pages.advance(slot, length, decoding=True)
                live[slot] = (length, rows)
        pages.check()
        table.update({(s, i): p for s, i, p in pages.take_updates()})
        for s in range(slots):
            own = pages.owned(s)
            assert tuple(table[s, i] for i in range(8)) == own + (pages.trash,) * (8 - len(own))
        assert pages.free + sum(len(pages.owned(s)) for s in range(slots)) == total
    pages.reset()
    assert pages.free == total
