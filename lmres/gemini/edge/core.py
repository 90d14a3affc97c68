"""The vault: what it knows of the generation, and how its parts work together. Runs in the event loop.

Rules:

1. The agent says what generation it is and what that begins from; a worker of another generation is turned away.
2. Frozen means: no grants. What was sealed, or will be from a fill under way, is told as it is.
3. A restored image is sealed in a slot and safe from the start. Images that are not in its past are dropped.
4. Workers are answered when both their restoration and their assignment are known, in whatever order they come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from lmres.errors import TransferError
from lmres.gemini import session
from lmres.gemini.certify import Print
from lmres.gemini.edge import durable
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.fetch import Fetched
from lmres.gemini.edge.memory import Place
from lmres.gemini.edge.persisting import Persister
from lmres.gemini.edge.ranks import LocalRank
from lmres.gemini.edge.replicas import Replicas
from lmres.gemini.edge.replicator import Replicator
from lmres.gemini.edge.restoring import Restoration
from lmres.gemini.edge.seat import Seat, whole_keys
from lmres.gemini.edge.services import Services
from lmres.gemini.edge.transfer import PartServer, PartSource
from lmres.gemini.edge.workers import WorkerLink
from lmres.gemini.inventory import Copy, Key
from lmres.gemini.session import Assignment, Message, Prepare
from lmres.gemini.slot import SlotState
from lmres.gemini.timeline import in_past
from lmres.gemini.watermark import Report, Verdict

_FREEZE_WAIT_S = 2.0
_SCAN_S = 10.0
_POLL_S = 0.005
_TELL_S = 1.0


class VaultCore:
    """``control_port``: where other vaults talk to this one; parts are served at ``parts.port``."""

    def __init__(self, services: Services, *, control_port: int) -> None:
        self._services = services
        self.control_port = control_port
        self.generation = 0
        self.frozen = True
        self.ever = False
        self.assignment: Assignment | None = None
        self._bases: dict[int, Key] = {}
        self._restoration: Restoration | None = None
        self.ranks: dict[int, LocalRank] = {}
        self._retired: dict[int, LocalRank] = {}  # not ours any more, but others may have to restore from them
        self._links: set[WorkerLink] = set()
        self._waiting: list[Callable[[], bool]] = []
        self._polling = False
        self._verified_s = -_TELL_S
        self._anchor: Key | None = None
        options = services.options
        self.parts = self._serve_parts(options.address)
        self.replicas = Replicas(services, local_passed=self._local_passed, on_change=self.changed)
        self.replicator = Replicator(
            services, parts_port=self.parts.port, sealed_copies=self._own_copies, on_change=self.changed
        )
        self.seat = Seat(services, on_verdict=self._on_verdict)
        self.persister = Persister(services, on_change=self.changed)
        self.on_assigned: Callable[[], None] = lambda: None

    def _serve_parts(self, address: str) -> PartServer:
        run_id, problem = self._services.options.run_id, self._services.log
        try:
            return PartServer(self._lookup, run_id=run_id, address=address, problem=problem)
        except TransferError:  # advertised, but not an address of this host
            return PartServer(self._lookup, run_id=run_id, problem=problem)

    # -- connections of this host (``reception``)

    def admit(self, channel: Channel, rank: int, pid: int) -> None:
        """A worker of this generation, whose rank is assigned here."""
        found = self._rank(rank)
        for link in [link for link in self._links if link.rank is found]:
            link.close("another worker of this rank came")
        channel.send({"op": "welcome"})
        link = WorkerLink(self, channel, found, pid=pid, loop=self._services.loop)
        self._links.add(link)
        if channel.closed:  # it was gone before it was let in, and nobody would tell of it later
            self.worker_gone(link, "it did not wait for its welcome")
            return
        self._send_gate()
        self.changed()

    def worker_gone(self, link: WorkerLink, reason: str) -> None:
        self._links.discard(link)
        if link.rank.worker is link:
            link.rank.detach(dead=link.dead)
            self._services.log(f"rank {link.rank.rank}: worker {link.pid} is gone ({reason})")
            self.changed()

    # -- what the agent asks

    def agent_says(self, message: Message, answer: Callable[[dict[str, Any]], None]) -> None:
        """``answer`` is called once, now or later. Raises RecordError, ValueError for what can not be done."""
        match message["op"]:
            case "assign":
                self._assign(session.assignment_from_plain(message["assignment"]))
                answer({})
            case "prepare":
                self._prepare(session.prepare_from_plain(message["prepare"]))
                answer({})
            case "freeze":
                self._freeze(message["generation"], answer)
            case "status":
                answer({"status": self._status()})
            case "end":
                answer({})
                self._services.loop.stop()
            case _:
                raise ValueError(f"{message['op']} came twice")

    def _freeze(self, generation: int, answer: Callable[[dict[str, Any]], None]) -> None:
        self.frozen = True
        end_s = time.monotonic() + _FREEZE_WAIT_S

        def ready() -> bool:
            if any(rank.busy for rank in self.ranks.values()) and time.monotonic() < end_s:
                return False
            self._services.scanning.run(self._scan, scanned)
            self._services.loop.after(_SCAN_S, late)
            return True

        answered = False

        def late() -> None:
            where = self._services.options.durable_directory
            scanned(None, TimeoutError(f"{where} was not read within {_SCAN_S:g} s"))

        def scanned(found: durable.Scanned | None, error: Exception | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            files = list(found.images) if found is not None else []
            problem = str(error) if error is not None else "; ".join(found.problems if found is not None else ())
            copies = [*self._copies(), *(image.image for image in files)]
            self.ever = self.ever or bool(files)
            self.persister.found(files)
            answer(
                {
                    "generation": generation,
                    "ever": self.ever,
                    "problem": problem,
                    "copies": [session.to_plain(copy) for copy in copies],
                }
            )

        # What workers said before is read first, though it came over other sockets.
        self._services.loop.after(0.001, lambda: self._until(ready))

    def _scan(self) -> durable.Scanned | None:
        options = self._services.options
        return None if options.durable_directory is None else durable.scan(options.durable_directory, options.run_id)

    def _own_copies(self) -> list[Copy]:
        return [copy for rank in self.ranks.values() for copy in rank.copies()]

    def _copies(self) -> list[Copy]:
        retired = [copy for rank in self._retired.values() for copy in rank.copies()]
        return [*self._own_copies(), *retired, *self.replicas.copies()]

    def _local_passed(self, step: int) -> bool:
        """No local rank can still seal this step."""
        return all(rank.last_step >= step and not rank.busy for rank in self.ranks.values())

    def _prepare(self, prepare: Prepare) -> None:
        """Begins to make the image ready. Old workers are done with: their memory is read and written from here on."""
        self.frozen = True
        self._begin(prepare.generation)
        self._bases[prepare.generation] = prepare.key
        if self._restoration is not None:
            self._restoration.cancel()
        ranks = [self._rank(rank) for rank in prepare.ranks]
        self._restoration = Restoration(self._services, prepare, ranks, done=self._restored)

    def _restored(self, rank: LocalRank, fetched: Fetched | None, why: str) -> None:
        if fetched is None:
            self._services.tell("problem", {"rank": rank.rank, "reason": why})
        else:
            copy = fetched.copy
            self.ever = True
            self._services.tell(
                "restored",
                {
                    "rank": rank.rank,
                    "step": copy.step,
                    "origin": copy.origin,
                    "source": fetched.source,
                    "bytes": fetched.bytes,
                    "moved": fetched.moved,
                    "duration_ms": fetched.fetch_ms,
                },
            )
            rank.drop_but(self._is_past_of(copy.key))
            self.replicator.say(copy)
            self.replicas.content_came()
        for link in list(self._links):
            self.answer_worker(link)
        self._run_waiting()
        self.changed()

    def _is_past_of(self, of: Key) -> Callable[[Key], bool]:
        return lambda key: in_past(key, of, self._bases)

    def _assign(self, assignment: Assignment) -> None:
        if assignment.generation < self.generation:
            raise ValueError(f"generation {assignment.generation} is over, the vault is at {self.generation}")
        new = self.assignment is None or self.assignment.generation != assignment.generation
        self._begin(assignment.generation)
        self.assignment = assignment
        safe = None if assignment.safe is None else Key(*assignment.safe)
        if new:
            self._new_generation(assignment, safe)
        self.replicator.assign(assignment)
        self.replicas.assign(assignment)
        self.persister.assign(assignment.ranks)
        self.seat.assign(assignment, safe, new=new)
        self.frozen = False
        self.on_assigned()
        for link in list(self._links):
            self.answer_worker(link)
        self.changed()

    def _new_generation(self, assignment: Assignment, safe: Key | None) -> None:
        keep = (lambda _: False) if safe is None else self._is_past_of(safe)
        if safe is not None:
            self._bases.setdefault(assignment.generation, safe)
        for number in [number for number in self.ranks if number not in assignment.ranks]:
            self._retired[number] = self.ranks.pop(number)
        for retired in self._retired.values():
            retired.drop_but(keep)
        for number in assignment.ranks:
            rank = self._rank(number)
            rank.begin(assignment.generation, safe, assignment.topology)
            rank.drop_but(keep)
        self.replicas.drop_but(keep)

    def _begin(self, generation: int) -> None:
        """Workers of older generations have no business here any more."""
        if generation < self.generation:
            raise ValueError(f"generation {generation} is over, the vault is at {self.generation}")
        if generation != self.generation:
            self.generation = generation
            for link in list(self._links):
                link.close(f"generation {generation} begins")

    # -- what the workers ask

    def when_restored(self, rank: LocalRank, act: Callable[[], object]) -> None:
        """Now, or once the rank's memory is no longer being restored into."""

        def ready() -> bool:
            if self._restoration is not None and self._restoration.running(rank.rank):
                return False
            act()
            return True

        self._until(ready)

    def answer_worker(self, link: WorkerLink) -> None:
        """Says what the generation begins from, if that is known and was asked."""
        assignment = self.assignment
        if not link.awaits or assignment is None or assignment.generation != self.generation:
            return
        restoration = self._restoration
        if restoration is not None and restoration.generation == self.generation:
            answer = restoration.answer(link.rank)
            if answer is None:
                return
        elif assignment.safe is not None:
            return  # its preparation is on the way
        else:
            answer = ({"op": "nothing"}, ())
        link.awaits = False
        link.send(*answer)

    def withdraw(self, rank: LocalRank, step: int) -> None:
        copy = rank.withdraw(step, safe=self.seat.safe)
        if copy is not None:
            self.replicator.withdrawn(copy)
            self._services.log(f"rank {rank.rank}: step {step} was withdrawn")
            self.changed()

    # -- state that changes

    def changed(self) -> None:
        """Something was sealed, held, dropped or became safe: say it, and grant what can be granted."""
        if self.frozen or self.assignment is None:
            return
        self.seat.report(self._report())
        verdict = self.seat.verdict
        # Before grants: what is to be written must not be given away.
        for key in reversed(verdict.persist):
            self.persister.persist(key, list(self.ranks.values()))
        self.replicas.advance(verdict)
        for rank in self.ranks.values():
            if self._restoration is None or not self._restoration.running(rank.rank):
                rank.offer(verdict.reusable)

    def _report(self) -> Report:
        ranks = self.ranks.values()
        whole, seen, floor = whole_keys([self._keys_of(rank) for rank in ranks])
        comparing = self._services.options.compare != "off"
        return Report(
            node_id=self._services.options.node_id,
            whole=whole,
            seen=seen,
            floor=floor,
            durable=frozenset(self.persister.durable),
            ranks=tuple(sorted(self.ranks)) if comparing else (),
            prints=self._prints() if comparing else {},
            replays=tuple((r.rank, replayed) for r in ranks for replayed in r.replayed) if comparing else (),
            room=comparing and self.replicas.has_room and all(rank.has_room for rank in ranks),
        )

    def _prints(self) -> dict[Key, dict[int, Print]]:
        found: dict[Key, dict[int, Print]] = {}
        for rank in self.ranks.values():
            for key, said in rank.prints(self.seat.safe).items():
                found.setdefault(key, {})[rank.rank] = said
        return found

    def _keys_of(self, rank: LocalRank) -> tuple[int, dict[Key, bool]]:
        keys = {}
        for index in range(len(rank.table)):
            key = rank.table.key(index)
            open_yet = key is not None and (self.seat.safe is None or key >= self.seat.safe)
            if key is not None and open_yet and key.origin == self.generation and not rank.unwanted(key):
                verdict = self.replicator.verdict(rank.rank, key)
                if verdict is not None:
                    keys[key] = verdict and rank.table.state(index) is SlotState.SEALED
        return rank.last_step, keys

    def _on_verdict(self, verdict: Verdict, gate_moved: bool) -> None:
        self._mark_verified(verdict)
        if verdict.safe is not None and not self.ever:
            self.ever = True
            self._services.tell("safe", {})
        if verdict.safe is not None and verdict.safe.origin == self.generation:
            for number in list(self._retired):
                self._retired.pop(number).close()
        if gate_moved:
            for rank in self.ranks.values():
                rank.no_earlier(verdict.gate)
            self._send_gate()
        if verdict.delete:
            self.persister.delete(verdict.delete)
        self.changed()

    def _mark_verified(self, verdict: Verdict) -> None:
        if verdict.verified:
            self.replicas.verified(verdict.verified)
            for rank in self.ranks.values():
                rank.verified(verdict.verified)
        newest, now_s = max(verdict.verified, default=None), time.monotonic()
        if newest is not None and self._verified_s + _TELL_S <= now_s:
            self._verified_s = now_s
            self._services.tell("verified", {"step": newest.step, "origin": newest.origin, "checks": ["state"]})
        anchor = verdict.anchor
        if anchor is not None and anchor != self._anchor:
            self._anchor = anchor
            checks = ["state", "replay"]
            self._services.tell("verified", {"step": anchor.step, "origin": anchor.origin, "checks": checks})

    def _send_gate(self) -> None:
        for link in self._links:
            link.send({"op": "gate", "step": self.seat.verdict.gate})

    def _rank(self, number: int) -> LocalRank:
        found = self.ranks.get(number) or self._retired.pop(number, None)
        if found is None:
            found = LocalRank(number, self._services, on_sealed=self._on_sealed, on_change=self.changed)
        self.ranks[number] = found
        return found

    def _on_sealed(self, copy: Copy, blocking_ms: float) -> None:
        rank = self.ranks.get(copy.rank)
        if rank is None:
            return
        self._services.tell(
            "captured",
            {
                "rank": copy.rank,
                "step": copy.step,
                "origin": copy.origin,
                "bytes": copy.shared.length + copy.own.length,
                "log_bytes": copy.log.length,
                "blocking_ms": blocking_ms,
                "trust": copy.trust,
                "finite": copy.finite,
            },
        )
        self.replicator.say(copy)
        self.replicas.content_came()

    def _lookup(self, digest: str) -> PartSource | None:
        """For the threads that serve parts."""
        place: Place | None = self._services.contents.acquire(digest)
        if place is None:
            return None
        segment = place.segment
        return PartSource(fd=segment.fd, offset=0, length=place.part.length, release=segment.release)

    def _until(self, ready: Callable[[], bool]) -> None:
        """Calls ``ready`` until it says so; soon after whatever it may wait for."""
        if not ready():
            self._waiting.append(ready)
            self._poll_soon()

    def _poll_soon(self) -> None:
        if self._waiting and not self._polling:
            self._polling = True
            self._services.loop.after(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._polling = False
        self._run_waiting()

    def _run_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting += [ready for ready in waiting if not ready()]
        self._poll_soon()

    def _status(self) -> dict[str, Any]:
        memory = self._services.memory
        safe = self.seat.safe
        return {
            "pid": os.getpid(),
            "generation": self.generation,
            "frozen": self.frozen,
            "memory_bytes": memory.held,
            "memory_limit_bytes": memory.limit,
            "safe": None if safe is None else list(safe),
            "verified": self._newest(self.seat.verdict.verified),
            "anchor": self._newest((self.seat.verdict.anchor,) if self.seat.verdict.anchor is not None else ()),
            "gate": self.seat.verdict.gate,
            "hub_connected": self.seat.connected,
            "ranks": {
                str(number): {
                    "newest": None if rank.table.newest is None else list(rank.table.newest),
                    "slots": [rank.table.state(index).value for index in range(len(rank.table))],
                    "log_bytes": rank.journal.segment.charged,
                    "worker": rank.worker is not None,
                }
                for number, rank in sorted(self.ranks.items())
            },
            "replicas": self.replicas.status(),
            "pulled_bytes": self.replicas.pulled_bytes,
            "copies": self.replicator.status(),
            "durable": self.persister.status(),
        }

    @staticmethod
    def _newest(keys: Iterable[Key]) -> list[int] | None:
        newest = max(keys, default=None)
        return None if newest is None else list(newest)

    def part(self) -> None:
        """There is no agent, and so nothing to capture: what is held is kept for those who come for it."""
        self.frozen = True
        self.seat.part()
        self.replicator.part()

    def close(self) -> None:
        """Everything ends here; memory goes with the process."""
        self.persister.stop()
        self.replicas.close()
        self.replicator.close()
        self.seat.close()
        self.parts.close(0.5)
