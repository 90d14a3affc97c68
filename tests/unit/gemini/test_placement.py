import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmres.gemini.placement import Host, groups, placement, survival, survival_of


def hosts(*domains: str, prefix: str = "n") -> list[Host]:
    return [Host(node_id=f"{prefix}{i:02d}", domain=d) for i, d in enumerate(domains)]


def own_domains(count: int) -> list[Host]:
    return hosts(*[f"d{i:02d}" for i in range(count)])


def domains_of(nodes: list[Host]) -> dict[str, str]:
    return {h.node_id: h.domain for h in nodes}


def ring(count: int, replicas: int) -> dict[str, list[str]]:
    return {str(i): [str((i + k) % count) for k in range(1, replicas)] for i in range(count)}


@pytest.mark.parametrize(
    ("lost", "layout", "percent"), [(2, "group", 93.3), (3, "group", 80.0), (2, "ring", 86.7), (3, "ring", 62.9)]
)
def test_sixteen_nodes_with_two_copies(lost, layout, percent):
    assert round(100 * survival(16, 2, lost, layout=layout), 1) == percent
    placed = placement(own_domains(16), 2) if layout == "group" else ring(16, 2)
    assert round(100 * survival_of(placed, lost), 1) == percent


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("replicas", range(1, 5))
def test_closed_forms_equal_enumeration(count, replicas):
    if replicas > count:
        return
    placed = placement(own_domains(count), replicas)
    for lost in range(count + 1):
        assert survival(count, replicas, lost) == pytest.approx(survival_of(placed, lost))
        assert survival(count, replicas, lost, layout="ring") == pytest.approx(survival_of(ring(count, replicas), lost))


@pytest.mark.parametrize("count", range(4, 12))
def test_groups_are_never_worse_than_a_ring(count):
    for lost in range(count + 1):
        assert survival(count, 2, lost) >= survival(count, 2, lost, layout="ring")


def test_groups_hold_each_other():
    placed = placement(own_domains(6), 3)
    assert all(set(placed[p]) == {n, *placed[n]} - {p} for n in placed for p in placed[n])


def test_the_last_group_is_a_ring_where_copies_do_not_divide_nodes():
    assert [len(g) for g in groups([str(i) for i in range(8)], 3)] == [3, 5]
    placed = placement(own_domains(5), 2)
    assert sorted(sum(p == n for ps in placed.values() for p in ps) for n in placed) == [1] * 5


def test_a_lost_rack_takes_no_pair_along():
    nodes = hosts("r1", "r1", "r1", "r1", "r2", "r2", "r2", "r2")
    placed, domain = placement(nodes, 2), domains_of(nodes)
    assert all(domain[n] != domain[p] for n, ps in placed.items() for p in ps)
    assert all(placed[p] == (n,) for n, (p,) in placed.items())


def test_two_in_one_rack_both_use_the_third():
    assert placement(hosts("r1", "r1", "r2"), 2) == {"n00": ("n02",), "n01": ("n02",), "n02": ("n01",)}


def test_one_active_node_uses_a_standby():
    assert placement(hosts("a"), 2, hosts("b", prefix="s")) == {"n00": ("s00",)}
    assert placement(hosts("a"), 2) == {"n00": ()}


def test_a_standby_of_another_domain_comes_first():
    assert placement(hosts("a"), 2, hosts("a", "b", prefix="s")) == {"n00": ("s01",)}


def test_standbys_hold_nothing_where_active_nodes_suffice():
    placed = placement(own_domains(4), 2, hosts("x", "y", prefix="s"))
    assert all(p.startswith("n") for ps in placed.values() for p in ps)


def test_one_copy_needs_nobody():
    assert placement(own_domains(3), 1) == {"n00": (), "n01": (), "n02": ()}


def test_bad_requests_are_refused():
    with pytest.raises(ValueError):
        placement(own_domains(2), 0)
    with pytest.raises(ValueError):
        placement(own_domains(2), 2, own_domains(1))
    with pytest.raises(ValueError):
        survival(2, 3, 1)


@given(
    st.lists(st.sampled_from("abcde"), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcz"), max_size=3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_any_hosts(active, standby, replicas, chance: random.Random):
    nodes, spare = hosts(*active), hosts(*standby, prefix="s")
    placed = placement(nodes, replicas, spare)
    assert list(placed) == sorted(placed, key=lambda n: (domains_of(nodes)[n], n))
    domain = domains_of(nodes + spare)
    loads = {n: sum(p == n for ps in placed.values() for p in ps) for n in domain}
    for node, partners in placed.items():
        assert node not in partners and len(set(partners)) == len(partners)
        assert len(partners) == min(replicas - 1, len(domain) - 1)
        if len({domain[n] for n in (node, *partners)}) <= len(partners):
            better = [n for n in domain if domain[n] not in {domain[x] for x in (node, *partners)}]
            assert all(loads[n] >= 2 * (replicas - 1) for n in better)
    shuffled = chance.sample(nodes, len(nodes))
    assert placement(shuffled, replicas, spare) == placed


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(2, 3))
def test_domains_no_larger_than_the_number_of_groups_never_meet(sizes, replicas):
    nodes = hosts(*[f"d{i}" for i, size in enumerate(sizes) for _ in range(size)])
    count = len(nodes) // replicas
    if len(nodes) % replicas or max(sizes) > count:
        return
    placed, domain = placement(nodes, replicas), domains_of(nodes)
    assert all(domain[n] != domain[p] for n, ps in placed.items() for p in ps)
    assert survival_of(placed, replicas) == pytest.approx(survival(len(nodes), replicas, replicas))
