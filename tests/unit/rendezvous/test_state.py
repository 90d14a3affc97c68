"""The view: what is kept of records that are whole, torn, foreign, or gone."""

from lmres.ids import Keys
from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.state import Door, Hold, Member, View
from tests.golden.story import Story, started

KEYS = Keys(run="r")


def test_a_torn_record_stays_as_it_was_read_but_can_be_replaced() -> None:
    story = started()
    key = story.keys.member("a")
    story.text(key, "{")
    assert story.view.member("a") is not None
    assert story.view.mod_revision(key) == story.revision
    assert key in story.view.problems
    assert not story.view.holds(key, story.view.member("a"))
    story.joins("a")
    assert key not in story.view.problems
    assert story.view.holds(key, story.view.member("a"))


def test_a_record_never_read_is_absent_but_its_revision_is_kept() -> None:
    view = View(keys=KEYS)
    view.apply((Entry(key=KEYS.plan(1), value="junk", create_revision=4, mod_revision=9),), 9)
    assert view.head() is None
    assert view.mod_revision(KEYS.plan(1)) == 9
    assert view.mod_revision(KEYS.plan(2)) == 0


def test_a_registration_that_can_not_be_read_may_be_somebody() -> None:
    view = View(keys=KEYS)
    view.apply((Entry(key=KEYS.member("a"), value="junk", create_revision=4, mod_revision=9),), 9)
    assert view.live_members() == ()
    assert view.unreadable_members() == ("a",)


def test_a_whole_record_under_another_key_is_not_believed() -> None:
    story = started(standbys="c")
    member = story.view.member("c")
    plan = story.head()
    for key, record in (
        (story.keys.member("x"), member),
        (story.keys.plan(2), plan),
        (story.keys.hold("a"), Hold(node_id="b", kind="drain", generation=1, reason="r")),
    ):
        story.put(key, record)
        assert key in story.view.problems
    assert story.view.member("x") is None
    assert story.head() is plan
    assert story.view.hold("a") is None


def test_unknown_keys_are_ignored() -> None:
    view = View(keys=KEYS)
    for key in (f"{KEYS.reg}future/thing", f"{KEYS.base}other", "/elsewhere", KEYS.lease("a")):
        view.apply((Entry(key=key, value="{}", create_revision=1, mod_revision=1),), 1)
    assert view.stored == {}
    assert view.problems == {}


def test_the_revision_never_goes_back() -> None:
    view = View(keys=KEYS)
    view.apply((), 9)
    view.apply((), 4)
    assert view.revision == 9


def test_members_are_in_order_of_registration() -> None:
    story = Story().joins("b", "a")
    assert [m.node_id for m in story.view.live_members()] == ["b", "a"]
    story.joins("b")
    assert [m.node_id for m in story.view.live_members()] == ["a", "b"]


def test_gone_is_final_for_one_incarnation_only() -> None:
    story = Story().joins("a").goes("a")
    assert story.view.gone("a") is not None
    assert not story.view.is_live("a", "a.1")
    story.joins("a")
    assert story.view.gone("a") is None
    assert story.view.is_live("a", "a.2")
    assert not story.view.is_live("a", "a.1")


def test_drain_and_readmission() -> None:
    story = started(standbys="c")
    story.operator("drain", "c")
    assert "drained" in (story.view.quarantine_reason("c") or "")
    assert story.view.standbys() == ()
    story.operator("readmit", "c")
    assert [m.node_id for m in story.view.standbys()] == ["c"]


def test_plans_after() -> None:
    story = started(standbys="c")
    story.goes("a").commits()
    assert [p.generation for p in story.view.plans_after(0)] == [1, 2]
    assert [p.generation for p in story.view.plans_after(1)] == [2]


def test_dropped_records_are_forgotten() -> None:
    story = started()
    assert story.view.ready(1)
    story.view.drop((f"{story.keys.reg}ready/00000001/",))
    assert story.view.ready(1) == {}
    assert story.view.mod_revision(story.keys.ready(1, "a")) == 0


def test_order_of_arrival_does_not_change_the_view() -> None:
    story = started(standbys="c").exits("b", -9, step=1)
    entries = [
        Entry(key=k, value=encode(s.record), create_revision=s.created, mod_revision=s.revision)
        for k, s in story.view.stored.items()
    ]
    turned = View(keys=story.keys)
    turned.apply(reversed(entries), story.revision)
    assert turned.stored == story.view.stored
    assert turned.head() == story.head()
    assert turned.evidence(1) == story.view.evidence(1)


def test_door_tells_who_came_last() -> None:
    view = View(keys=KEYS)
    door = Door(node_id="a", incarnation="a.1")
    view.apply((Entry(key=KEYS.door, value=encode(door), create_revision=1, mod_revision=3),), 3)
    assert view.holds(KEYS.door, door)
    assert view.mod_revision(KEYS.door) == 3


def test_member_of_a_prefix_of_a_name_is_another() -> None:
    story = Story()
    member = Member(
        node_id="a1",
        incarnation="a1.1",
        address="::1",
        host="h",
        boot_id="b",
        pid=1,
        pid_start=1,
        failure_domain="a1",
    )
    story.put(story.keys.member("a1"), member)
    assert story.view.member("a") is None
