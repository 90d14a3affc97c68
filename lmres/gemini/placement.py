"""Who holds whose copies in memory, and how likely that is to be enough.

Source: GEMINI (Wang et al., SOSP 2023, doi 10.1145/3600006.3613145), section 4. With N nodes and m copies (the own one
included), groups of m nodes hold each other's states; a state is lost only if a whole group is lost at once, and no
placement with as many copies has fewer such sets of nodes. Where m does not divide N the last group is larger, and is a
ring: each node's copies are on the next m - 1.

Nodes of one failure domain are lost together, so groups are dealt out over domains. Sorted by domain and dealt round
like cards, no group of N / m gets two of one domain unless that domain is larger than the number of groups. What is
left over after that is repaired one by one: such a copy goes to the least loaded node of another domain, if one can
take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

Layout = Literal["group", "ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    node_id: str
    domain: str


def placement(active: Sequence[Host], replicas: int, standbys: Sequence[Host] = ()) -> dict[str, tuple[str, ...]]:
    """For each active node, the others that hold copies of its state: ``replicas`` - 1, fewer if there are none.

    The same for the same hosts in whatever order. Standbys hold copies where the active nodes do not suffice: too few
    of them, or all in one domain. Nobody holds copies of more than 2 * (``replicas`` - 1) others because of domains.
    """
    if replicas < 1:
        raise ValueError(f"placement: replicas counts the own copy, so it is at least 1, found {replicas}")
    order = sorted(active, key=lambda h: (h.domain, h.node_id))
    spare = sorted(standbys, key=lambda h: (h.domain, h.node_id))
    domain = {h.node_id: h.domain for h in (*order, *spare)}
    if len(domain) != len(order) + len(spare):
        raise ValueError("placement: a node is named twice")
    partners: dict[str, list[str]] = {h.node_id: [] for h in order}
    for members in groups([h.node_id for h in order], replicas):
        for node_id, holders in _within(_apart(members, domain, replicas), replicas):
            partners[node_id] = holders
    _fill_up(partners, [h.node_id for h in spare], domain, replicas)
    _move_apart(partners, list(domain), domain, replicas)
    return {h.node_id: tuple(sorted(partners[h.node_id])) for h in order}


def groups(node_ids: Sequence[str], replicas: int) -> list[list[str]]:
    """Dealt round; the last group takes what is left over, so it may be larger."""
    count = max(1, len(node_ids) // replicas)
    dealt = [[node_ids[i] for i in range(g, count * replicas, count) if i < len(node_ids)] for g in range(count)]
    dealt[-1] += node_ids[count * replicas :]
    return [g for g in dealt if g]


def _within(members: Sequence[str], replicas: int) -> Iterator[tuple[str, list[str]]]:
    """A ring; in a group of exactly ``replicas`` nodes that is everybody."""
    size = len(members)
    for i, node_id in enumerate(members):
        yield node_id, [members[(i + k) % size] for k in range(1, min(replicas, size))]


def _apart(members: Sequence[str], domain: Mapping[str, str], replicas: int) -> list[str]:
    """An order in which close neighbours are of different domains, as far as taking the next best one finds it."""
    left, ring = list(members), [members[0]]
    left.remove(members[0])
    while left:
        near = [domain[n] for n in ring[-(replicas - 1) :]] if replicas > 1 else []
        sizes = {d: sum(domain[n] == d for n in left) for d in {domain[n] for n in left}}
        ring.append(min(left, key=lambda n: (near.count(domain[n]), -sizes[domain[n]], n)))
        left.remove(ring[-1])
    return ring


def _loads(partners: Mapping[str, Sequence[str]]) -> dict[str, int]:
    loads: dict[str, int] = {}
    for holders in partners.values():
        for holder in holders:
            loads[holder] = loads.get(holder, 0) + 1
    return loads


def _fill_up(partners: dict[str, list[str]], spare: Sequence[str], domain: Mapping[str, str], replicas: int) -> None:
    """Standbys hold what too few active nodes can not."""
    loads = _loads(partners)
    for node_id, holders in partners.items():
        while len(holders) < replicas - 1:
            free = [s for s in spare if s not in holders]
            if not free:
                break
            near = [domain[n] for n in (node_id, *holders)]
            chosen = min(free, key=lambda s: (domain[s] in near, loads.get(s, 0), s))
            holders.append(chosen)
            loads[chosen] = loads.get(chosen, 0) + 1


def _move_apart(partners: dict[str, list[str]], nodes: Sequence[str], domain: Mapping[str, str], replicas: int) -> None:
    """Moves copies that a lost domain would take along, until none can be. ``nodes``: active ones first.

    A move makes room where it comes from, so others may follow; each leaves one such copy less.
    """
    loads = _loads(partners)
    while _move_some_apart(partners, loads, nodes, domain, replicas):
        pass


def _move_some_apart(
    partners: dict[str, list[str]],
    loads: dict[str, int],
    nodes: Sequence[str],
    domain: Mapping[str, str],
    replicas: int,
) -> bool:
    moved = False
    for node_id, holders in partners.items():
        for i, holder in enumerate(holders):
            near = [domain[n] for n in (node_id, *holders[:i])]
            if domain[holder] not in near:
                continue
            near += [domain[n] for n in holders[i + 1 :]]
            free = [
                (loads.get(n, 0), rank, n)
                for rank, n in enumerate(nodes)
                if domain[n] not in near and loads.get(n, 0) < 2 * (replicas - 1)
            ]
            if free:
                chosen = min(free)[2]
                loads[holder] -= 1
                loads[chosen] = loads.get(chosen, 0) + 1
                holders[i] = chosen
                moved = True
    return moved


def survival(nodes: int, replicas: int, lost: int, *, layout: Layout = "group") -> float:
    """The probability that ``lost`` nodes, all sets equally likely, leave a copy of every state. Closed form.

    ``group``: GEMINI's placement, mixed where ``replicas`` does not divide ``nodes``; ``ring``: all nodes in one ring.
    """
    if not 0 <= lost <= nodes or not 1 <= replicas <= nodes:
        raise ValueError(f"survival: {nodes} nodes, {replicas} copies and {lost} lost do not fit")
    if layout == "ring" or nodes < 2 * replicas:
        return _ring_ways(nodes, replicas, lost) / comb(nodes, lost)
    last = replicas + nodes % replicas
    count = (nodes - last) // replicas
    ways = sum(
        _group_ways(count, replicas, lost - k) * _ring_ways(last, replicas, k) for k in range(min(lost, last) + 1)
    )
    return ways / comb(nodes, lost)


def _sign(number: int) -> int:
    return -1 if number % 2 else 1


def _group_ways(count: int, size: int, lost: int) -> int:
    """Sets of ``lost`` nodes that contain none of ``count`` groups: inclusion and exclusion over groups wholly lost."""
    every = count * size
    return sum(
        _sign(j) * comb(count, j) * comb(every - j * size, lost - j * size)
        for j in range(count + 1)
        if 0 <= lost - j * size <= every - j * size
    )


def _ring_ways(size: int, run: int, lost: int) -> int:
    """Sets of ``lost`` nodes of a ring without ``run`` neighbours in a row.

    The nodes that stay cut the ring into as many gaps, each of 0 to ``run`` - 1 lost nodes.
    """
    stay = size - lost
    if lost < run:
        return comb(size, lost)
    if stay == 0:
        return 0
    gaps = sum(
        _sign(j) * comb(stay, j) * comb(size - 1 - j * run, stay - 1) for j in range(stay + 1) if size - 1 >= j * run
    )
    return size * gaps // stay


def survival_of(partners: Mapping[str, Sequence[str]], lost: int) -> float:
    """The same for a given placement among active nodes, by looking at every set of lost nodes."""
    holders = [frozenset((n, *p)) for n, p in partners.items()]
    sets = [frozenset(c) for c in combinations(sorted(partners), lost)]
    return sum(not any(h <= gone for h in holders) for gone in sets) / len(sets)
