"""The sums behind the decisions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfy.process_memory import arithmetic as sums
from comfy.process_memory.provider import Candidate, DeviceUsage, Kind, Outcome, Receipt

GIB = 1 << 30
sizes = st.integers(0, 100 * GIB)
amounts = st.one_of(st.floats(), st.integers(-GIB, 10**40), st.sampled_from([1e30, 1e32, 0.1, math.inf, -math.inf, math.nan]))


@pytest.mark.parametrize("amount, bytes_", [(1e30, 24 * GIB), (1e32, 24 * GIB), (math.inf, 24 * GIB), (0.1, 1), (0, 0), (-5.0, 0),
                                            (math.nan, 0), (1.5, 2), (7 * GIB, 7 * GIB)])
def test_sentinels_become_whole_bytes_of_the_card(amount, bytes_):
    clamped = sums.clamp(amount, 24 * GIB)
    assert clamped == bytes_ and isinstance(clamped, int)


@given(amounts, sizes)
def test_whatever_is_asked_for_no_more_than_the_card_is_sent(amount, card):
    assert 0 <= sums.clamp(amount, card) <= card


@given(amounts, amounts, sizes)
def test_a_shortfall_is_never_more_than_the_card_nor_negative(required, free, card):
    assert 0 <= sums.shortfall(required, free, card) <= card


def test_a_peers_candidate_sorts_by_the_keys_of_the_ladder():
    own = [(0, 3, 6, 1), (-5, 9, 9, 0)]
    peers = [sums.rank(Candidate(id=name, name=name, resident=resident, size=size, refs=refs), place)
             for place, (name, resident, size, refs) in enumerate([("more offloaded", 1, 8, 9), ("smaller", 4, 4, 3), ("equal", 6, 6, 3)])]
    order = sorted(own + peers)
    assert order == [peers[0], own[1], peers[1], own[0], peers[2]], "an own model goes before a peer's that is equal otherwise"


def test_an_unused_allocator_cache_goes_before_any_model():
    cache = sums.rank(Candidate(id="c", name="cache", kind=Kind.CACHE, resident=1, size=1, refs=99), 7)
    assert sorted([(-10**12, 0, 0, 0), cache])[0] == cache


def test_without_smart_memory_peers_come_after_every_own_model():
    cache = sums.rank(Candidate(id="c", name="cache", kind=Kind.CACHE, resident=1, size=1), 0, own_first=True)
    assert sorted([cache, (0, 99, 99 * GIB, 4)])[-1] == cache


@given(st.lists(sizes), sizes)
def test_the_second_pass_asks_as_few_as_are_enough(held, missing):
    chosen = sums.enough(range(len(held)), held, missing)
    total = sum(held[i] for i in chosen)
    assert total >= missing or len(chosen) == len(held)
    assert not chosen or total - held[chosen[-1]] < missing


def test_what_a_provider_does_not_say_is_charged_at_its_ceiling():
    assert sums.charged_claim(DeviceUsage(resident=4, committed=10)) == 6
    assert sums.charged_claim(DeviceUsage(resident=4, committed=10, claimed=1)) == 1
    assert sums.charged_claim(DeviceUsage(resident=None)) == 0
    assert sums.charged_holding(DeviceUsage(resident=None), 24) == 24
    assert sums.charged_holding(DeviceUsage(resident=None, committed=9), 24) == 9
    assert sums.charged_holding(DeviceUsage(resident=4, committed=10), 24) == 10
    assert sums.charged_holding(DeviceUsage(resident=4, cached=1, fixed=2, scratch=3, committed=99), 24) == 10


@given(sizes, sizes, sizes)
def test_claims_of_others_never_add_to_free_and_never_take_this_processs_own_cache(total, cached, others):
    free = sums.free_here(total, cached, others)
    assert free <= total
    assert free >= min(total, cached)


@given(st.lists(sizes, max_size=4), sizes)
def test_a_claim_is_never_more_than_there_is(wanted, available):
    assert sums.granted_claim(wanted, available) == min(sum(wanted), available)


@given(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=8), st.integers(GIB, 100 * GIB), st.integers(0, 2 * GIB))
def test_loads_admitted_one_after_another_never_pass_the_card_and_leave_the_reserve_once(loads, card, reserve):
    """Each process reads the same free figure, works out a budget from it, and only then comes to the lock."""
    stale = max(0, card - reserve)
    resident = 0
    for offloaded, full in loads:
        available = card - resident
        asked = sums.FULL if full else max(sums.LEAST, min(offloaded, stale))
        budget = sums.granted_budget(asked, offloaded, available, available - reserve, contended=True)
        coming = offloaded if budget == sums.FULL else sums.clamp(budget, offloaded)
        assert budget == asked or asked == sums.FULL or budget <= asked
        resident += min(coming, available) if budget == sums.LEAST else coming
        assert resident <= card
    if not any(full for _, full in loads):
        assert resident <= max(0, card - reserve) + len(loads)


@pytest.mark.parametrize("budget", [sums.FULL, sums.LEAST, -3 * GIB, 2.5 * GIB])
def test_without_contention_a_budget_stays_what_it_was(budget):
    assert sums.granted_budget(budget, 5 * GIB, 4 * GIB, 3 * GIB, contended=False) == budget


def test_a_whole_model_becomes_a_part_only_because_of_others():
    assert sums.granted_budget(sums.FULL, 5 * GIB, 4 * GIB, 3 * GIB, contended=True) == 3 * GIB
    assert sums.granted_budget(sums.FULL, 4 * GIB, 4 * GIB, 3 * GIB, contended=True) == sums.FULL
    assert sums.granted_budget(sums.FULL, 5 * GIB, 0, -GIB, contended=True) == sums.LEAST


def test_a_nodes_claim_shrinks_as_its_bytes_appear():
    assert sums.still_to_come(8, base=100, now=100) == 8
    assert sums.still_to_come(8, base=100, now=103) == 5
    assert sums.still_to_come(8, base=100, now=120) == 0
    assert sums.still_to_come(8, base=100, now=90) == 8


def test_only_freed_counts_and_never_more_than_was_held():
    assert sums.freed(Receipt(outcome=Outcome.FREED, freed=100), 60) == 60
    assert sums.freed(Receipt(outcome=Outcome.FREED, freed=40), 60) == 40
    for outcome in (Outcome.BUSY, Outcome.NOTHING, Outcome.GONE):
        assert sums.freed(Receipt(outcome=outcome, freed=40), 60) == 0
    assert sums.freed(None, 60) == 0
