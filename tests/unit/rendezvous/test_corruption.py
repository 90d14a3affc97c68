"""From what vaults have found to evidence."""

from __future__ import annotations

from typing import Any

from lmres.rendezvous.corruption import Charge, charges
from lmres.rendezvous.plan import ActiveNode, Plan
from lmres.rendezvous.state import Member


def member(name: str) -> Member:
    return Member(
        node_id=name,
        incarnation=f"{name}-1",
        address="1.2.3.4",
        host=f"host-{name}",
        boot_id="b",
        pid=1,
        pid_start=1,
        failure_domain=name,
    )


def plan_of(*names: str, generation: int = 1, **more: Any) -> Plan:
    return Plan(
        plan_id="p",
        generation=generation,
        from_generation=generation - 1,
        action="start",
        active=tuple(ActiveNode(slot=i, node_id=n, incarnation=f"{n}-1") for i, n in enumerate(names)),
        standby=(),
        quarantined=(),
        reason="",
        recovery_source={},
        dismissed={},
        origin=generation,
        **{"failure_class": "none", **more},
    )


def of(
    found: dict[str, Any],
    plan: Plan,
    *,
    before: Plan | None = None,
    then: Plan | None = None,
    replace: bool = True,
) -> tuple[Charge, ...]:
    fields = {"step": 12, "origin": 1, "ranks": [], "what": "", "trusted": [11, 1], "from_start": False, "then": 1}
    return charges(
        {**fields, **found},
        plan=plan,
        before=before,
        then=then,
        member=member,
        me=member("a"),
        local_world_size=2,
        replace=replace,
    )


def test_a_majority_names_rank_and_node_and_has_it_replaced() -> None:
    (charge,) = of({"check": "state", "groups": [[0, 1, 2], [3]]}, plan_of("a", "b"))
    cause = charge.cause
    assert (cause.rank, cause.local_rank, cause.node_id, cause.host, cause.step) == (3, 1, "b", "host-b", 12)
    assert charge.attributed and charge.evict and charge.reaction == "recover" and charge.trusted == (11, 1)
    assert "differs from ranks 0, 1 and 2 in parameters or optimizer state" in cause.headline()


def test_ranks_of_several_nodes_are_each_accused() -> None:
    found = of({"check": "state", "groups": [[0, 1, 4, 5, 6], [2], [7]]}, plan_of("a", "b", "c", "d"))
    assert [(c.cause.node_id, c.cause.rank) for c in found] == [("b", 2), ("d", 7)]


def test_ranks_of_one_node_are_one_accusation() -> None:
    (charge,) = of({"check": "state", "groups": [[0, 1, 4], [2, 3]]}, plan_of("a", "b", "c"))
    assert (charge.cause.node_id, charge.cause.rank) == ("b", 2)


def test_without_a_majority_nobody_is_accused_and_the_state_still_goes_back() -> None:
    (charge,) = of({"check": "state", "groups": [[0], [2]]}, plan_of("a", "b"))
    assert not charge.attributed and not charge.evict and charge.cause.rank is None and charge.cause.node_id == ""
    assert charge.reaction == "recover" and charge.trusted == (11, 1)
    assert charge.cause.detail.startswith("rank 0 against rank 2 in parameters or optimizer state, after step 12")


def test_who_is_not_finite_while_its_equal_is_was_wrong() -> None:
    (charge,) = of({"check": "state", "groups": [[0], [2]], "ranks": [2]}, plan_of("a", "b"))
    assert charge.attributed and charge.evict and charge.cause.rank == 2
    assert "differs from rank 0 in parameters, which are not finite" in charge.cause.detail


def test_the_policy_may_want_to_be_told_only() -> None:
    for groups in ([[0, 1, 2], [3]], [[0], [2]]):
        (charge,) = of({"check": "state", "groups": groups}, plan_of("a", "b"), replace=False)
        assert charge.reaction == "report" and not charge.evict


def test_a_replay_names_the_part_and_trusts_what_it_certifies() -> None:
    found = {
        "check": "replay",
        "groups": [[0, 1, 2], [3]],
        "what": "outer (Linear) of 4x16 float32|00ff",
        "trusted": [8, 1],
    }
    (charge,) = of(found, plan_of("a", "b"))
    assert charge.trusted == (8, 1) and charge.cause.rank == 3
    assert "outer (Linear) of 4x16 float32 gives for the same inputs" in charge.cause.detail
    assert "00ff" not in charge.cause.detail


def test_a_run_that_has_certified_nothing_yet_begins_again() -> None:
    found = {"check": "replay", "groups": [[0, 1, 2], [3]], "what": "x", "trusted": None}
    assert of({**found, "from_start": True}, plan_of("a", "b"))[0].trusted == (0, 0)
    (charge,) = of(found, plan_of("a", "b"))
    assert charge.trusted is None and "may hold what was computed wrongly" in charge.cause.detail


def test_what_was_wrong_once_is_told_and_nobody_accused() -> None:
    (charge,) = of({"check": "once", "groups": [], "ranks": [1], "what": "x", "trusted": None}, plan_of("a", "b"))
    assert charge.reaction == "report" and not charge.attributed and charge.cause.rank is None
    assert charge.trusted is None and "rank 1 did not come to the same twice" in charge.cause.detail


def test_who_was_wrong_then_is_replaced_now() -> None:
    found = {"check": "again", "groups": [[0], [2]], "ranks": [2], "origin": 2}
    (charge,) = of(found, plan_of("a", "b", generation=2), then=plan_of("a", "b"))
    assert charge.reaction == "replace" and charge.attributed and charge.cause.node_id == "b"
    assert charge.trusted is None
    assert "had other parameters or optimizer state than rank 0" in charge.cause.detail


def test_who_was_wrong_then_and_has_gone_is_left_alone() -> None:
    found = {"check": "again", "groups": [[0], [2]], "ranks": [2], "origin": 2}
    assert of(found, plan_of("a", "c", generation=2), then=plan_of("a", "b")) == ()


TWO = {"check": "replay", "groups": [[0], [2]], "what": "outer (Linear)|00", "trusted": [8, 1]}
DOUBT = {"generation": 2, "failure_class": "silent_corruption", "verdict": "inconclusive"}


def test_where_two_differ_in_a_replay_a_third_opinion_is_asked_for() -> None:
    (charge,) = of(TWO, plan_of("a", "b"))
    assert not charge.attributed and charge.evict and charge.reaction == "recover"
    assert [(s.node_id, s.rank) for s in charge.cause.suspects] == [("a", 0), ("b", 2)]
    (charge,) = of({**TWO, "check": "state"}, plan_of("a", "b"))
    assert not charge.evict and charge.cause.suspects == (), "the same steps made again will tell"


def test_if_they_differ_again_the_one_that_stayed_is_wrong() -> None:
    (charge,) = of(TWO, plan_of("a", "s", **DOUBT), before=plan_of("a", "b"))
    assert charge.attributed and charge.evict and (charge.cause.node_id, charge.cause.rank) == ("a", 0)


def test_without_a_standby_nothing_has_changed_and_nobody_can_tell() -> None:
    (charge,) = of(TWO, plan_of("a", "b", **DOUBT), before=plan_of("a", "b"))
    assert not charge.attributed


def test_if_they_agree_from_then_on_the_other_was() -> None:
    found = {"check": "cleared", "groups": [], "what": "outer (Linear)|00"}
    (charge,) = of(found, plan_of("a", "s", **DOUBT), before=plan_of("a", "b"))
    assert charge.attributed and charge.reaction == "replace" and charge.cause.node_id == "b"
    assert of(found, plan_of("a", "b", **DOUBT), before=plan_of("a", "b")) == (), "it went away by itself"
