from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmres.gemini.inventory import PART_NAMES, Copy, Holdings, Key, Part, topology_text
from lmres.gemini.restore import Choice, Nothing, choose, copies_of

TOPOLOGY = topology_text(nodes=2, local_world_size=1)


def part(text: str) -> Part:
    return Part(digest=text.encode().hex()[-32:].zfill(32), length=len(text))


def copy(rank: int, step: int, origin: int = 1, *, has: str = "shared own log", ddp: bool = False, **more: Any) -> Copy:
    """``ddp``: the shared part is the same for all ranks."""
    name = f"{step}.{origin}"
    values: dict[str, Any] = {
        "place": "memory",
        "finite": True,
        "trust": "unverified",
        "topology": TOPOLOGY,
        "shared": part(f"s{name}{'' if ddp else f'.{rank}'}"),
        "own": part(f"o{name}.{rank}"),
        "log": part(f"l{name}.{rank}"),
    }
    return Copy(rank=rank, step=step, origin=origin, has=tuple(has.split()), **{**values, **more})


def holds(node: str, *copies: Copy, ever: bool = True, problem: str = "") -> Holdings:
    return Holdings(
        node_id=node,
        incarnation=f"{node}.1",
        generation=1,
        address="host",
        port=1,
        copies=copies,
        ever=ever,
        problem=problem,
    )


def pick(*holdings: Holdings, slots: str = "ab", banned: Any = (), local: int = 1, topology: str = TOPOLOGY):
    return choose(
        holdings, slots=dict(enumerate(slots)), local_world_size=local, topology=topology, banned=frozenset(banned)
    )


def test_the_newest_step_from_own_memory():
    found = pick(holds("a", copy(0, 4), copy(0, 5)), holds("b", copy(1, 4), copy(1, 5)))
    assert isinstance(found, Choice)
    assert (found.step, found.origin, found.source) == (5, 1, {0: "local", 1: "local"})
    assert found.reason == "step 5 (from own memory: slots 0-1)"


def test_one_copy_missing_means_an_older_common_step():
    found = pick(holds("a", copy(0, 4), copy(0, 5)), holds("b", copy(1, 4), copy(1, 5, has="shared log")))
    assert isinstance(found, Choice) and found.step == 4
    assert "step 5 captured in generation 1 is not whole, nobody has: rank 1 (own)" in found.reason


def test_the_replaced_node_gets_its_image_from_a_peer():
    found = pick(holds("a", copy(0, 5), copy(1, 5)), holds("c", ever=False), slots="ac")
    assert isinstance(found, Choice) and found.source == {0: "local", 1: "peer"}


def test_live_replicas_count_as_copies():
    found = pick(holds("a", copy(0, 5, ddp=True), copy(1, 5, ddp=True, has="own log")), holds("c"), slots="ac")
    assert isinstance(found, Choice) and found.source == {0: "local", 1: "replica"}


def test_files_are_used_where_memory_has_nothing():
    files = holds("c", copy(0, 3, place="durable"), copy(1, 3, place="durable"))
    found = pick(holds("a", copy(0, 3), copy(0, 5)), files, slots="ac")
    assert isinstance(found, Choice)
    assert (found.step, found.source) == (3, {0: "local", 1: "durable"})


def test_memory_of_a_newer_step_beats_files_of_an_older():
    files = holds("a", copy(0, 3, place="durable"), copy(1, 3, place="durable"), copy(0, 5))
    found = pick(files, holds("b", copy(1, 5)))
    assert isinstance(found, Choice) and found.step == 5


def test_origins_never_mix():
    found = pick(holds("a", copy(0, 5, 1), copy(0, 4, 1)), holds("b", copy(1, 5, 2), copy(1, 4, 1)))
    assert isinstance(found, Choice) and (found.step, found.origin) == (4, 1)


def test_of_one_step_the_later_origin_is_taken():
    found = pick(holds("a", copy(0, 5, 1), copy(0, 5, 2)), holds("b", copy(1, 5, 1), copy(1, 5, 2)))
    assert isinstance(found, Choice) and found.origin == 2


def test_banned_keys_and_only_those_are_passed_over():
    a = holds("a", copy(0, 4), copy(0, 5), copy(0, 5, 2))
    b = holds("b", copy(1, 4), copy(1, 5), copy(1, 5, 2))
    found = pick(a, b, banned=[(5, 2)])
    assert isinstance(found, Choice) and (found.step, found.origin) == (5, 1)
    assert "banned" in found.reason


def test_one_rank_that_is_not_finite_spoils_the_step():
    found = pick(holds("a", copy(0, 4), copy(0, 5)), holds("b", copy(1, 4), copy(1, 5, finite=False)))
    assert isinstance(found, Choice) and found.step == 4 and "not finite" in found.reason


def test_another_topology_is_refused_and_both_are_named():
    four = topology_text(nodes=2, local_world_size=2)
    held = holds("a", *[copy(r, 7, topology=four) for r in range(4)])
    found = pick(held, holds("b"))
    assert isinstance(found, Nothing) and found.lost
    assert four in found.reason and TOPOLOGY in found.reason


def test_an_older_key_of_the_right_shape_is_used():
    four = topology_text(nodes=2, local_world_size=2)
    found = pick(holds("a", copy(0, 3), copy(1, 3), copy(0, 7, topology=four)), holds("b"))
    assert isinstance(found, Choice) and found.step == 3


def test_nothing_captured_yet_begins_at_the_start():
    assert pick(holds("a", ever=False), holds("b", ever=False)) == Nothing(
        reason="no state has been captured yet", lost=False
    )


def test_an_image_that_never_became_safe_is_no_loss():
    found = pick(holds("a", copy(0, 1), ever=False), holds("b", ever=False))
    assert isinstance(found, Nothing) and not found.lost
    assert "rank 1 (everything)" in found.reason


def test_lost_says_what_is_missing_and_what_went_wrong():
    found = pick(holds("a", copy(0, 5)), holds("c", ever=False, problem="too little memory"), slots="ac")
    assert isinstance(found, Nothing) and found.lost
    assert "step 5" in found.reason and "rank 1 (everything)" in found.reason and "too little memory" in found.reason


def test_lost_with_nothing_held_at_all():
    found = pick(holds("a"), holds("b", ever=False))
    assert isinstance(found, Nothing) and found.lost and "there was one (a knew of it)" in found.reason


def test_verified_only_if_all_are():
    verified = pick(holds("a", copy(0, 5, trust="verified")), holds("b", copy(1, 5, trust="verified")))
    mixed = pick(holds("a", copy(0, 5, trust="verified")), holds("b", copy(1, 5)))
    assert isinstance(verified, Choice) and verified.trust == "verified"
    assert isinstance(mixed, Choice) and mixed.trust == "unverified"


def test_an_empty_part_is_had_by_everybody():
    empty = Part(digest="0" * 32, length=0)
    found = pick(
        holds("a", copy(0, 5, log=empty, has="shared own")), holds("b", copy(1, 5, log=empty, has="own shared"))
    )
    assert isinstance(found, Choice) and found.source == {0: "local", 1: "local"}


def test_several_ranks_a_slot_take_the_farthest_source():
    topology = topology_text(nodes=2, local_world_size=2)
    a = holds("a", *[copy(r, 5, topology=topology) for r in (0, 1, 3)])
    b = holds("b", copy(2, 5, topology=topology))
    found = pick(a, b, local=2, topology=topology)
    assert isinstance(found, Choice) and found.source == {0: "local", 1: "peer"}


def test_the_copies_of_a_key_are_found_for_preparing():
    held = [holds("a", copy(0, 5), copy(1, 5), copy(1, 4)), holds("b", copy(1, 5, has="own"))]
    found = copies_of(held, (5, 1), [1])
    assert [(c.rank, c.step) for c in found] == [(1, 5), (1, 5)]


@st.composite
def stocks(draw):
    """A group of two or three slots; who holds what is chance."""
    count, ddp = draw(st.integers(1, 3)), draw(st.booleans())
    topology = topology_text(nodes=count, local_world_size=1)
    nodes = "abcd"[: count + draw(st.integers(0, 1))]
    held = []
    for node in nodes:
        copies = draw(
            st.lists(
                st.builds(
                    lambda rank, step, origin, has, place, finite: copy(
                        rank, step, origin, has=" ".join(has), ddp=ddp, topology=topology, place=place, finite=finite
                    ),
                    st.integers(0, count - 1),
                    st.integers(1, 3),
                    st.integers(1, 2),
                    st.sampled_from([PART_NAMES, PART_NAMES, ("own", "log"), ("shared",)]),
                    st.sampled_from(["memory", "memory", "durable"]),
                    st.sampled_from([True] * 9 + [False]),
                ),
                max_size=8,
            )
        )
        held.append(holds(node, *copies, ever=bool(copies)))
    banned = draw(st.frozensets(st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=2))
    return held, nodes[:count], topology, banned


def whole_keys(held, count, topology, banned) -> set[Key]:
    """By the definition, without any cleverness."""
    copies = [c for h in held for c in h.copies]
    parts = {p for c in copies for p in c.held()}
    keys = {c.key for c in copies if c.topology == topology}
    return {
        key
        for key in keys
        if key not in banned
        and all(c.finite for c in copies if c.key == key)
        and all(
            any(c.key == key and c.rank == r and {p for _, p in c.parts()} <= parts for c in copies)
            for r in range(count)
        )
    }


@given(stocks())
def test_newest_whole_key_always(stock):
    held, slots, topology, banned = stock
    found = pick(*held, slots=slots, topology=topology, banned=banned)
    whole = whole_keys(held, len(slots), topology, banned)
    if isinstance(found, Choice):
        assert (found.step, found.origin) == max(whole)
        check_sources(held, slots, found)
    else:
        assert not whole and found.lost == any(h.ever for h in held)
    assert found == pick(*reversed(held), slots=slots, topology=topology, banned=banned)


def check_sources(held, slots, found) -> None:
    for slot, node in enumerate(slots):
        needed = {p for c in copies_of(held, (found.step, found.origin), [slot]) for _, p in c.parts()}
        here = {p for h in held if h.node_id == node for c in h.copies if c.place == "memory" for p in c.held()}
        memory = {p for h in held for c in h.copies if c.place == "memory" for p in c.held()}
        assert (found.source[slot] == "local") == (needed <= here)
        assert (found.source[slot] == "durable") == (not needed <= memory)


@given(stocks(), st.data())
def test_more_copies_never_make_it_older(stock, data):
    held, slots, topology, banned = stock
    before = pick(*held, slots=slots, topology=topology, banned=banned)
    extra = copy(0, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), topology=topology)
    held[0] = replace(held[0], copies=(*held[0].copies, extra))
    after = pick(*held, slots=slots, topology=topology, banned=banned)
    if isinstance(before, Choice):
        assert isinstance(after, Choice) and (after.step, after.origin) >= (before.step, before.origin)


@pytest.mark.parametrize("count", [400])
def test_long_stories_stay_short(count):
    held = holds("a", *[copy(0, step) for step in range(1, count)])
    found = pick(held, holds("b"))
    assert isinstance(found, Nothing) and len(found.reason) < 500 and f"and {count - 1 - 3} more" in found.reason


def test_what_differs_between_equals_is_passed_over_before_anybody_has_compared_it():
    def group(flipped: int, trust: str = "verified") -> Choice | Nothing:
        def of(rank: int) -> Holdings:
            newer = copy(rank, 5, ddp=rank != flipped)
            return holds("ab"[rank], copy(rank, 4, ddp=True, trust=trust), newer)

        return pick(of(0), of(1))

    found = group(flipped=1)
    assert isinstance(found, Choice)
    assert (found.step, found.trust) == (4, "verified") and "differs between ranks that were equal" in found.reason
    assert group(flipped=9).step == 5
    assert group(flipped=1, trust="unverified").step == 5, "who was never equal is not held to it"


def test_ranks_with_shards_of_their_own_are_not_held_to_anything():
    found = pick(
        holds("a", copy(0, 4, trust="verified"), copy(0, 5)), holds("b", copy(1, 4, trust="verified"), copy(1, 5))
    )
    assert found.step == 5


def test_one_vault_that_knows_of_the_comparison_is_enough():
    found = pick(holds("a", copy(0, 5, trust="verified"), copy(1, 5)), holds("b", copy(1, 5, trust="verified")))
    assert found.trust == "verified"
