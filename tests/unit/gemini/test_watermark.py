import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmres.gemini.inventory import Key
from lmres.gemini.watermark import Hub, Report, Verdict
from tests.unit.gemini.vaults import Group


def key(step: int) -> Key:
    return Key(step, 1)


def keys(*steps: int) -> frozenset[Key]:
    return frozenset(key(s) for s in steps)


def has(name: str, *steps: int, floor: int, **more) -> Report:
    return Report(node_id=name, whole=keys(*steps), seen=keys(*steps), floor=floor, **more)


def hub(*names: str, **settings) -> Hub:
    return Hub(members=frozenset(names or ("a", "b")), **settings)


def test_safe_is_the_newest_that_all_have():
    group = hub()
    assert group.report(has("a", 1, 2, floor=2)).safe is None
    assert group.report(has("b", 1, floor=1)).safe == key(1)
    assert group.report(has("b", 1, 2, floor=2)).safe == key(2)


def test_safe_never_goes_back():
    group = hub()
    group.report(has("a", 2, floor=2))
    group.report(has("b", 2, floor=2))
    group.report(has("a", 1, floor=1))
    assert group.report(has("b", 1, floor=1)).safe == key(2)


def test_what_one_vault_missed_is_dead_and_stays_so():
    group = hub()
    group.report(has("a", 1, floor=1))
    verdict = group.report(has("b", floor=1))
    assert verdict.is_dead(key(1)) and verdict.reusable(key(1))
    assert not verdict.is_dead(key(2)) and not verdict.reusable(key(2))
    verdict = group.report(has("b", 1, floor=1))
    assert verdict.safe is None and verdict.is_dead(key(1))


def test_a_key_that_waits_for_its_copies_is_not_dead():
    group = hub()
    group.report(has("a", 1, floor=1))
    verdict = group.report(Report(node_id="b", seen=keys(1), floor=0))
    assert not verdict.is_dead(key(1))
    assert group.report(has("b", 1, floor=1)).safe == key(1)


def test_a_key_of_some_ranks_only_is_dead():
    verdict = hub("a").report(Report(node_id="a", seen=keys(1), floor=1))
    assert verdict.is_dead(key(1))


def test_who_has_ended_captures_no_more():
    group = hub()
    group.report(has("a", 1, floor=1, ended=True))
    assert group.report(has("b", 1, floor=1)).safe == key(1)
    assert group.report(has("b", 1, 2, floor=2)).is_dead(key(2))


def test_older_than_safe_may_be_written_again_and_safe_not():
    verdict = Verdict(safe=key(5), dead=(key(8),))
    assert [k for k in range(4, 10) if verdict.reusable(key(k))] == [4, 8]
    assert verdict.reusable(None)


def test_strangers_do_not_count():
    assert hub("a").report(has("x", 1, floor=9)).safe is None


@pytest.mark.parametrize(
    "wrong", [{"members": frozenset()}, {"durable_interval": 0}, {"keep": 0}], ids=["members", "interval", "keep"]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError):
        Hub(**{"members": frozenset("a"), **wrong})


def test_the_first_safe_key_after_each_multiple_is_persisted_once():
    group = hub("a", durable_interval=10)
    ordered = [group.report(has("a", s, floor=s)).persist[-1:] for s in (3, 9, 12, 15, 19, 20, 41, 42)]
    assert [k[0].step if k else None for k in ordered] == [None, None, 12, 12, 12, 20, 41, 41]


def test_a_restored_step_is_not_persisted_again():
    group = hub("a", durable_interval=10, safe=Key(20, 1))
    assert group.report(Report(node_id="a", whole=frozenset({Key(21, 2)}), floor=21)).persist == ()


def test_files_older_than_the_kept_ones_are_deleted():
    group = hub(durable_interval=10, keep=2)
    group.report(has("a", floor=0, durable=keys(10, 20, 30, 40)))
    assert group.report(has("b", floor=0, durable=keys(10, 20))).delete == ()
    assert group.report(has("b", floor=0, durable=keys(10, 20, 30))).delete == keys_in_order(10)
    assert group.report(has("b", floor=0, durable=keys(40))).delete == keys_in_order(10, 20)


def keys_in_order(*steps: int) -> tuple[Key, ...]:
    return tuple(key(s) for s in steps)


def test_one_missed_capture_shuts_no_gate():
    group = Group.of(count=2, ranks=1, replicated=True)
    group.vaults["v1"].verdict = Verdict(gate=3)
    group.run(ticks=30, delay=lambda m: 0)
    assert group.hub.verdict().gate == 0 and group.safes[-1].step == 30


def test_dead_keys_do_not_pile_up():
    group = hub()
    for step in range(1, 500):
        group.report(has("a", *([step] if step % 2 else []), floor=step))
        verdict = group.report(has("b", *([] if step % 2 else [step]), floor=step))
        assert len(verdict.dead) < 5


@pytest.mark.parametrize("slow", range(0, 40, 3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_faster_than_talk_is_still_protected(slow, ranks):
    group = Group.of(count=3, ranks=ranks, replicated=True)
    waits = {"v0": 0, "v1": slow, "v2": slow // 2, "hub": 0}
    group.run(ticks=1500, delay=lambda m: waits[m.to])
    assert len(group.safes) >= 1500 // (12 * (slow + 1)), group.safes


@pytest.mark.parametrize("seed", range(8))
def test_any_delays_within_bounds(seed):
    chance = random.Random(seed)
    most = chance.choice((1, 3, 10, 30))
    group = Group.of(
        count=chance.randint(1, 5),
        ranks=chance.randint(1, 2),
        replicated=chance.random() < 0.7,
        interval=chance.choice((1, 1, 3)),
        safe=chance.choice((None, Key(7, 1))),
        durable_interval=chance.choice((None, 1, 5)),
    )
    group.run(ticks=800, delay=lambda m: chance.randint(0, most))
    assert len(group.safes) >= 800 // (25 * (most + 3)), group.safes


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_for_replay_does_not_hold_up_captures(seed):
    chance = random.Random(seed)
    most = chance.choice((0, 1, 5, 20))
    group = Group.of(count=chance.randint(2, 4), ranks=chance.randint(1, 2), replicated=True, anchors=True)
    group.run(ticks=800, delay=lambda m: chance.randint(0, most))
    assert len(group.safes) >= 800 // (25 * (most + 3)), group.safes
    assert len(group.anchors) >= 3, group.anchors


class Vaults(RuleBasedStateMachine):
    """Steps and deliveries in any order; whatever happened, with fair delivery captures go on."""

    group: Group

    @initialize(
        count=st.integers(1, 4),
        ranks=st.integers(1, 2),
        replicated=st.booleans(),
        restored=st.booleans(),
        every=st.sampled_from([None, 1, 3]),
        anchors=st.booleans(),
    )
    def begin(self, count, ranks, replicated, restored, every, anchors):
        safe = Key(4, 1) if restored else None
        self.group = Group.of(
            count=count,
            ranks=ranks,
            replicated=replicated,
            anchors=anchors,
            safe=safe,
            durable_interval=every,
        )

    @rule(data=st.data())
    def step(self, data):
        name = data.draw(st.sampled_from(sorted(self.group.vaults)))
        rank = data.draw(st.integers(0, self.group.vaults[name].ranks - 1))
        if self.group.may_step(name, rank):
            self.group.vaults[name].advance(rank)

    @precondition(lambda self: self.group.bag)
    @rule(data=st.data())
    def arrive(self, data):
        index = data.draw(st.integers(0, len(self.group.bag) - 1))
        self.group.deliver(self.group.bag.pop(index))

    @precondition(lambda self: self.group.bag)
    @rule(data=st.data())
    def arrive_twice(self, data):
        self.group.deliver(data.draw(st.sampled_from(self.group.bag)))

    @precondition(lambda self: self.group.bag)
    @rule()
    def newest_arrives_first(self):
        self.group.deliver(self.group.bag.pop())

    @invariant()
    def a_key_is_held_by_all(self):
        if hasattr(self, "group"):
            self.group.check()

    def teardown(self):
        if not hasattr(self, "group"):
            return
        self.group.settle()
        before, rounds = self.group.hub.safe, 0
        while self.group.hub.safe in (None, before):
            rounds += 1
            assert rounds < 20 + 2 * self.group.hub.verdict().gate, "captures have stopped"
            for name, vault in self.group.vaults.items():
                for rank in range(vault.ranks):
                    if self.group.may_step(name, rank):
                        vault.advance(rank)
            self.group.settle()


Vaults.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestVaults = Vaults.TestCase
