"""What goes wrong, when and to whom: drawn from the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmres.gemini.inventory import Key
from lmres.ports import Get, Put, Txn
from lmres.rendezvous.codec import encode
from lmres.rendezvous.parting import Answer, Break
from lmres.rendezvous.state import Hold, StopRequest
from tests.sim.looks import FOR_EVER_MS, Desync

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.world import World

THEME_FACTOR = 8
_EXITS = (-9, -9, -11, -6, 1)
_EXCEPTIONS = (
    ("ValueError", "loss is nan"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("torch.distributed.DistBackendError", "Connection closed by peer [10.0.0.7]:4711"),
)


def _someone(world: World) -> Process | None:
    living = world.living()
    return world.rng.choice(living) if living else None


def kill_agent(world: World) -> None:
    process = _someone(world)
    if process is not None:
        process.kill()


def kill_observers(world: World) -> None:
    """All that watch everybody at once, in a run so large that not everybody does."""
    for process in world.living():
        if process.agent.ledger.observer_index() is not None:
            process.kill()


def restart_agent(world: World) -> None:
    """Killed with its workers, and started anew on the same host a moment later, with the same node id."""
    process = _someone(world)
    if process is not None:
        process.kill()
        delay_ms = world.rng.choice((10, 300, 3_000, 8_000))
        world.after(delay_ms, lambda: _launch(world, process.node_id, process.host.name))


def _launch(world: World, node_id: str, host: str | None = None) -> None:
    if not world.calm:
        world.launch(node_id, host)


def pause_agent(world: World) -> None:
    process = _someone(world)
    if process is not None and not process.paused:
        timeout_ms = world.scenario.timeout_ms
        about_the_timeout_ms = timeout_ms + world.rng.randint(-timeout_ms // 5, timeout_ms // 10)
        process.pause(world.rng.choice((200, 2_000, about_the_timeout_ms, about_the_timeout_ms, 9_000, 15_000)))


def pause_everybody(world: World) -> None:
    for process in world.living():
        if not process.paused:
            process.pause(world.rng.randint(4_000, 9_000))


def sigterm(world: World) -> None:
    process = _someone(world)
    if process is not None:
        process.sigterm()
        if world.rng.random() < 0.5:
            delay_ms = world.rng.randint(500, 8_000)
            world.after(delay_ms, lambda: _launch(world, process.node_id, process.host.name))


def crash_worker(world: World) -> None:
    members = world.program.members()
    if members:
        process, workers = world.rng.choice(members)
        if world.rng.random() < 0.5:
            process.worker_failed(workers, exit_status=world.rng.choice(_EXITS))
        else:
            process.worker_failed(workers, exception=world.rng.choice(_EXCEPTIONS))


def crash_two(world: World) -> None:
    crash_worker(world)
    world.after(world.rng.randint(0, 200), lambda: crash_worker(world))


def freeze_store(world: World) -> None:
    world.freeze(world.rng.choice((300, 2_000, 6_000, 14_000)))


def freeze_while_forming(world: World) -> None:
    """The store stops answering when a new group is about to form, for longer than that may take."""
    crash_worker(world)
    world.after(world.rng.randint(200, 600), lambda: world.freeze(14_000))


def duplicate(world: World) -> None:
    """A second launcher with a node id that is in use, on the same host or on another."""
    process = _someone(world)
    if process is not None:
        world.log(f"FAULT a second agent with the id {process.node_id}")
        _launch(world, process.node_id, world.rng.choice((process.host.name, f"other-{process.node_id}")))


def replace_the_stopped(world: World) -> None:
    """An agent is stopped, its scheduler gives it up and starts another with its name elsewhere; then it goes on."""
    process = _someone(world)
    if process is not None and not process.paused:
        process.pause(15_000)
        world.after(1_000, lambda: _launch(world, process.node_id, f"other-{process.node_id}"))


def late_joiner(world: World) -> None:
    _launch(world, f"late{len(world.processes)}")


def crowd(world: World) -> None:
    """More agents than MAX."""
    for _ in range(world.scenario.max_nodes):
        _launch(world, f"extra{len(world.processes)}")


def operator_drain(world: World) -> None:
    process = _someone(world)
    if process is not None:
        operator(world, "drain", process.node_id)


def operator_readmit(world: World) -> None:
    process = _someone(world)
    if process is not None:
        operator(world, "readmit", process.node_id)


def operator(world: World, kind: str, node_id: str) -> None:
    if world.keys.config not in world.oracle.records:
        return  # no such run
    head = world.oracle.head()
    generation = head.generation if head is not None else 0
    world.log(f"FAULT operator: {kind} {node_id}")
    hold = Hold(node_id=node_id, kind=kind, generation=generation, reason="maintenance")  # type: ignore[arg-type]
    world.apply(Txn(success=(Put(key=world.keys.hold(node_id), value=encode(hold)),)), None)


def operator_stop(world: World) -> None:
    if world.rng.random() < 0.3:
        _stop(world)


def _stop(world: World) -> None:
    if world.living() and world.keys.config in world.oracle.records:
        world.log("FAULT operator: stop")
        put = Put(key=world.keys.stop, value=encode(StopRequest(reason="enough")))
        world.apply(Txn(success=(put,)), None)


def garbage(world: World) -> None:
    """Something that is not a record of ours, or not of this place, under one of the keys.

    A plan of a generation that is already committed is spared only if nobody has read it: no protocol survives a
    store that forgets what it has confirmed.
    """
    if not world.oracle.records or not world.processes:
        return
    process = world.rng.choice(world.processes)  # a dead one's records too
    head, keys, node_id = world.oracle.head(), world.keys, process.node_id
    generation = head.generation if head is not None else 0
    key = world.rng.choice(
        (
            keys.plan(generation + 1),
            keys.plan(generation + 1),
            keys.ready(generation, node_id),
            keys.ready(generation + 1, node_id),
            keys.done(generation, node_id),
            keys.formed(generation + 1),
            keys.evidence(generation, node_id, 0),
            keys.lease(node_id),
            keys.lease(node_id),
            keys.member(node_id),
            keys.hold(node_id),
            f"{keys.reg}unknown/thing",
        )
    )
    world.log(f"FAULT garbage in {key.removeprefix(keys.base)}")
    world.apply(Txn(success=(Put(key=key, value=_garbage(world, key)),)), None)


def foreign_record(world: World) -> None:
    """A whole record of ours under the key of another node."""
    keys, nodes = world.keys, sorted({p.node_id for p in world.processes})
    if len(nodes) > 1:
        one, other = world.rng.sample(nodes, 2)
        record = world.oracle.records.get(keys.member(one))
        if record is not None:
            world.apply(Txn(success=(Put(key=keys.member(other), value=encode(record)),)), None)


def slow_beat(world: World) -> None:
    """An agent is stopped for about the timeout while requests are slow: it beats while it is being given up."""
    process = _someone(world)
    if process is not None and not process.paused:
        process.pause(world.scenario.timeout_ms - world.rng.randint(0, 2 * world.scenario.interval_ms))
        world.slow_until_ms = world.now_ms + 2 * world.scenario.timeout_ms


def kill_and_tear(world: World) -> None:
    """An agent dies, and the last heartbeat of it is torn."""
    process = _someone(world)
    if process is not None:
        process.kill()
        key = world.keys.lease(process.node_id)
        world.after(1_000, lambda: world.apply(Txn(success=(Put(key=key, value="{"),)), None))


def _garbage(world: World, key: str) -> str:
    reads = world.engine.apply(Txn(success=(Get(key=key),))).reads[0]
    if reads and reads[0].value and world.rng.random() < 0.4:
        return reads[0].value[: world.rng.randint(0, len(reads[0].value) - 1)]  # torn
    others = sorted(k for k in world.oracle.records if not k.startswith(world.keys.leases) and k != key)
    if others and world.rng.random() < 0.4:
        return encode(world.oracle.records[world.rng.choice(others)])  # a whole record of another key
    return world.rng.choice(
        ("", "null", "[]", "{}", json.dumps({"record": "Plan"}), '{"record":"Lease"}', "\x00\x01", "7")
    )


def stop_at_the_end(world: World) -> None:
    """The operator stops the run in the moment in which it succeeds."""
    world.at_success = lambda: world.after(world.rng.randint(0, 600), lambda: _stop(world))


def changing_of_the_guard(world: World) -> None:
    """All are told to leave while a new one comes in."""
    for process in world.living():
        process.sigterm()
    for _ in range(world.rng.randint(1, 3)):
        world.after(world.rng.randint(0, 600), lambda: late_joiner(world))


@dataclass(frozen=True, slots=True)
class Fault:
    """``weight``: how often in a mixed seed; ``theme``: the seeds that have more of it."""

    weight: int
    theme: str
    happen: Callable[[World], None]


ALL = (
    Fault(4, "comings", kill_agent),
    Fault(4, "comings", restart_agent),
    Fault(4, "pauses", pause_agent),
    Fault(1, "pauses", pause_everybody),
    Fault(1, "pauses", slow_beat),
    Fault(2, "comings", sigterm),
    Fault(6, "workers", crash_worker),
    Fault(3, "workers", crash_two),
    Fault(3, "store", freeze_store),
    Fault(1, "store", freeze_while_forming),
    Fault(2, "comings", duplicate),
    Fault(1, "comings", replace_the_stopped),
    Fault(3, "comings", late_joiner),
    Fault(1, "comings", crowd),
    Fault(2, "workers", operator_drain),
    Fault(2, "workers", operator_readmit),
    Fault(1, "ends", operator_stop),
    Fault(1, "success", stop_at_the_end),
    Fault(1, "ends", changing_of_the_guard),
    Fault(4, "garbage", garbage),
    Fault(1, "garbage", kill_and_tear),
    Fault(1, "garbage", foreign_record),
)


# -- faults of runs that keep states; drawn by their own chance -------------------------------------------------------


def crash_host(world: World) -> None:
    """The agent, its workers and its vault at once."""
    living = world.living()
    if living:
        process = world.states.chance.choice(living)
        world.log(f"FAULT host {process.host.name} crashes")
        for (host, _), vault in sorted(world.states.vaults.items()):
            if host == process.host.name:
                world.states.lose(vault)
        for other in living:
            if other.host is process.host:
                other.kill()


def kill_vault(world: World) -> None:
    living = world.living()
    if living:
        process = world.states.chance.choice(living)
        world.log(f"FAULT the vault of {process.name} is killed")
        world.states.lose(world.states.vault(process))
        process.vault_lost()


def corrupt_copy(world: World) -> None:
    """A byte flips in one image; whoever is to use it finds out by its digest."""
    found = [(v, r, i) for _, v in sorted(world.states.vaults.items()) if v.alive for r, i in v.images()]
    if found:
        vault, rank, image = world.states.chance.choice(found)
        world.log(f"FAULT rank {rank} of {image.key} is corrupted in the vault of {vault.name}")
        image.corrupt = True
        world.states.corrupted.add(image.key)


def slow_to_tell(world: World) -> None:
    living = world.living()
    if living:
        process = world.states.chance.choice(living)
        world.log(f"FAULT the vault of {process.name} answers late")
        process.deaf_until_ms = world.now_ms + world.states.chance.choice((2_000, 6_000, 15_000))


def corrupt_and_crash(world: World) -> None:
    """The newest image in a vault is corrupted, and a moment later a host crashes: the copy is needed."""
    found = [v for _, v in sorted(world.states.vaults.items()) if v.alive and any(v.images())]
    if found:
        vault = world.states.chance.choice(found)
        newest = max(i.key for _, i in vault.images())
        for _, image in vault.images():
            if image.key == newest:
                image.corrupt = True
        world.states.corrupted.add(newest)
        world.log(f"FAULT {newest} is corrupted in the vault of {vault.name}")
        world.after(world.states.chance.randint(1, 300), lambda: crash_host(world))


def crash_two_hosts(world: World) -> None:
    """Often both that have copies of one state."""
    crash_host(world)
    world.after(world.states.chance.randint(0, 400), lambda: crash_host(world))


STATE_FAULTS = (
    crash_host,
    crash_host,
    crash_two_hosts,
    kill_vault,
    corrupt_copy,
    corrupt_and_crash,
    corrupt_and_crash,
    slow_to_tell,
)


# -- faults of connections between agents; drawn by their own chance -------------------------------------------------


def break_link(world: World) -> None:
    """One connection breaks, for both or for one of its ends, and can be made again at once."""
    links = world.links
    if links.open:
        pair = links.chance.choice(sorted(links.open))
        sides = links.chance.choice(((0, 1), (0,), (1,)))
        world.log(f"FAULT the connection of {pair} breaks for {len(sides)}")
        links.broke(pair, links.chance.choice(tuple(Break)), sides=sides)


def cut_hosts(world: World) -> None:
    """Two hosts do not reach each other for a while; sometimes a firewall says so, sometimes nobody does."""
    links, names = world.links, sorted({p.host.name for p in world.living()})
    if len(names) > 1:
        one, other = links.chance.sample(names, 2)
        answer = links.chance.choice((Answer.REFUSED, Answer.NONE))
        world.log(f"FAULT no way between {one} and {other}")
        links.cut(one, other, links.chance.choice((300, 2_000, 10_000)), answer, links.chance.choice(tuple(Break)))


def isolate(world: World) -> None:
    """An agent loses all its connections, and lives; sometimes it is stopped too, for less than the timeout."""
    living, chance = world.living(), world.links.chance
    if living:
        process = chance.choice(living)
        world.log(f"FAULT {process.name} has no connections")
        world.links.isolate(process, chance.choice((300, 3_000, 20_000)))
        pause_ms = chance.choice((0, 0, world.scenario.interval_ms, 2 * world.scenario.interval_ms))
        if pause_ms:
            delay_ms = chance.choice((0, 100, world.scenario.interval_ms, 2_000))
            world.after(delay_ms, lambda: None if process.paused or not process.alive else process.pause(pause_ms))


def kill_a_linked_one(world: World) -> None:
    """An agent dies whose connections stand."""
    living, chance = [p for p in world.living() if not p.paused], world.links.chance
    if living:
        chance.choice(living).kill()


LINK_FAULTS = (break_link, cut_hosts, isolate, isolate, kill_a_linked_one)


# -- workers that stand still; drawn by their own chance --------------------------------------------------------------


def _runner(world: World, chance: random.Random) -> tuple[Process, Workers] | None:
    """A worker that runs, and is not on its way out."""
    members = [pair for pair in world.program.members() if not pair[0].paused or chance.random() < 0.3]
    ending = world.program.step >= world.scenario.total_steps
    return chance.choice(members) if members and not ending else None


def stop_worker(world: World) -> None:
    found = _runner(world, world.looks.chance)
    if found is not None:
        world.log(f"FAULT the worker of {found[0].name} stops")
        world.looks.stop(*found)


def slow_worker(world: World) -> None:
    """A worker is slow: it goes on 10 to 600 ms after the first alarm."""
    found = _runner(world, world.looks.chance)
    if found is not None and world.program.has_trained(found[1].group):
        world.log(f"FAULT the worker of {found[0].name} is slow")
        world.looks.stop(*found, long=False)


def stop_two(world: World) -> None:
    stop_worker(world)
    world.after(world.looks.chance.choice((50, 1_000, 2_000)), lambda: stop_worker(world))


def deaf_watcher(world: World) -> None:
    """An agent does not look, for a while or for ever; at most one of all for ever."""
    living, looks = world.living(), world.looks
    if living:
        process = looks.chance.choice(living)
        for_ms = looks.chance.choice((800, 3_000, 10_000, 0))
        for_ever = not for_ms and max(looks.deaf.values(), default=0) < FOR_EVER_MS
        looks.deaf[process.name] = FOR_EVER_MS if for_ever else world.now_ms + (for_ms or 10_000)
        world.log(f"FAULT {process.name} does not look until {looks.deaf[process.name]}")


def deaf_and_stopped(world: World) -> None:
    deaf_watcher(world)
    world.after(world.looks.chance.randint(0, 1_000), lambda: stop_worker(world))


def desync(world: World) -> None:
    """A rank enters another operation than the others; it is another one that dies of it, if any does."""
    looks, chance = world.looks, world.looks.chance
    found = _runner(world, chance)
    if found is None or not world.program.moves(found[1].group) or not world.program.has_trained(found[1].group):
        return
    process, workers = found
    group = workers.group
    looks.stop(process, workers, place="all inside")
    number = looks.stand(group)
    how = chance.choice(("op", "shape", "left out", "one too many", "step"))
    looks.desyncs[group] = Desync(slot=workers.slot, number=number, how=how)  # type: ignore[arg-type]
    world.log(f"FAULT the worker of {process.name} enters another operation number {number}: {how}")
    others = [pair for pair in world.program.group(group) if pair[1] is not workers]
    victim, its_workers = chance.choice(others) if others else found
    if chance.random() < 0.25 or not others:
        return  # nobody dies: they just wait

    def dies() -> None:
        if its_workers.state in ("running", "stuck"):
            if chance.random() < 0.5:
                victim.worker_failed(its_workers, exit_status=-6)
            else:
                lost = ("torch.distributed.DistBackendError", "Connection closed by peer [10.0.0.7]:4711")
                victim.worker_failed(its_workers, exception=lost)

    victim.later(chance.choice((20, 500, 1_500, 3_000)), dies)


LOOK_FAULTS = (
    stop_worker,
    stop_worker,
    stop_worker,
    stop_two,
    slow_worker,
    slow_worker,
    slow_worker,
    slow_worker,
    deaf_watcher,
    deaf_and_stopped,
    desync,
    desync,
    desync,
)


# -- what is wrong though nothing has failed; drawn by its own chance -------------------------------------------------


def unhealthy(world: World) -> None:
    living, doubts = world.living(), world.doubts
    if living:
        process = doubts.chance.choice(living)
        doubts.sicken(process)
        heals_ms = doubts.chance.choice((None, 300, 2_000, 8_000))
        if heals_ms is not None:
            world.after(heals_ms, lambda: doubts.heal(process))


def sick_newcomer(world: World) -> None:
    """A late joiner on a host that is unfit."""
    name = f"sick{len(world.processes)}"
    world.doubts.sick_hosts.add(name)
    _launch(world, name)


def straggler(world: World) -> None:
    """A rank is slow, though not stuck. Told, or to be replaced."""
    chance = world.doubts.chance
    found = _training(world)
    if found:
        reaction, attributed = chance.choice(("replace", "report")), chance.random() < 0.8
        world.doubts.find(
            chance.choice(found)[0],
            chance.choice(found),
            "straggler",
            reaction=reaction,  # type: ignore[arg-type]
            attributed=attributed,
        )


def corruption(world: World) -> None:
    """A rank computes wrongly; states since an older one, that is there, are not to be trusted."""
    chance, found = world.doubts.chance, _training(world)
    if not found:
        return
    trusted = None
    if world.states.on:
        keys = sorted(world.states.keys(v for _, v in sorted(world.states.vaults.items())))
        trusted = chance.choice([Key(0, 0), *keys[-4:], *keys[-4:]]) if chance.random() < 0.9 else None
    suspect, attributed = chance.choice(found), chance.random() < 0.6
    others = [pair for pair in found if pair is not suspect]
    world.doubts.find(
        chance.choice(found)[0],
        suspect,
        "silent_corruption",
        reaction="recover",
        evict=chance.random() < 0.5,
        trusted=trusted,
        attributed=attributed,
        or_else=chance.choice(others) if others and not attributed else None,
    )


def _training(world: World) -> list[tuple[Process, Workers]]:
    return [pair for pair in world.program.members() if world.program.has_trained(pair[1].group)]


def straggler_and_standby(world: World) -> None:
    straggler(world)
    world.after(world.doubts.chance.choice((100, 2_000)), lambda: late_joiner(world))


DOUBT_FAULTS = (
    unhealthy,
    unhealthy,
    unhealthy,
    sick_newcomer,
    straggler,
    straggler_and_standby,
    straggler_and_standby,
    corruption,
    corruption,
    corruption,
)


def _schedule_own(world: World, chance: random.Random, faults: tuple[Callable[[World], None], ...]) -> None:
    """Faults of one kind, drawn by its own chance, while most runs still train."""
    for _ in range(chance.choice((1, 2, 4))):
        fault, at_ms = chance.choice(faults), chance.randint(2_000, min(20_000, world.scenario.safety_ms))
        world.after(at_ms, lambda f=fault: f(world))  # type: ignore[misc]


def _schedule_link_faults(world: World) -> None:
    chance = world.links.chance
    for _ in range(chance.choice((0, 1, 2, 4)) if world.links.on else 0):
        fault, at_ms = chance.choice(LINK_FAULTS), chance.randint(2_000, world.scenario.safety_ms)
        world.after(at_ms, lambda f=fault: f(world))  # type: ignore[misc]


def _schedule_state_faults(world: World) -> None:
    chance = world.states.chance
    for _ in range(chance.choice((0, 1, 2, 4)) if world.states.on else 0):
        fault, at_ms = chance.choice(STATE_FAULTS), chance.randint(2_000, world.scenario.safety_ms)
        world.after(at_ms, lambda f=fault: f(world))  # type: ignore[misc]


def schedule(world: World) -> None:
    """Draws the faults of the safety phase."""
    s = world.scenario
    if s.theme != "large":
        _schedule_state_faults(world)
        _schedule_link_faults(world)
        if world.looks.on:
            _schedule_own(world, world.looks.chance, LOOK_FAULTS)
        if world.doubts.on:
            _schedule_own(world, world.doubts.chance, DOUBT_FAULTS)
    if s.theme == "success":
        stop_at_the_end(world)
    if s.theme == "large":
        world.after(s.safety_ms // 2, lambda: kill_observers(world))
    weights = [f.weight * (THEME_FACTOR if f.theme == s.theme else 1) for f in ALL]
    for _ in range(s.faults):
        fault = world.rng.choices(ALL, weights=weights)[0]
        at_ms = world.rng.randint(200, s.safety_ms)
        world.after(at_ms, lambda f=fault: f.happen(world))  # type: ignore[misc]
