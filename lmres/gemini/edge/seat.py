"""What the group has agreed on: this vault's seat at the hub, or the hub itself when this vault is it.

Reports go to the hub, verdicts come back (``watermark``); both are complete each time, so that a lost connection costs
time only. While the hub is out of reach nothing becomes safe, no slot is granted, and training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lmres.errors import RecordError
from lmres.gemini.certify import Certifier, Covered, Finding, Replayed, part_name
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.links import Link
from lmres.gemini.edge.services import Services
from lmres.gemini.inventory import Key
from lmres.gemini.session import (
    Assignment,
    Message,
    key_from_plain,
    keys_from_plain,
    prints_from_plain,
    prints_to_plain,
    replayed_from_plain,
)
from lmres.gemini.watermark import Hub, Report, Verdict

_MAX_EARLY = 4096
_MAX_ANCHORS = 8


class Seat:
    """``on_verdict`` gets each verdict that says something new, and whether the gate moved."""

    def __init__(self, services: Services, *, on_verdict: Callable[[Verdict, bool], None]) -> None:
        self._services = services
        self._on_verdict = on_verdict
        self.verdict = Verdict()
        self._generation = 0
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._listeners: dict[Channel, str] = {}
        self._early: dict[str, tuple[int, Report, Channel]] = {}
        self._reported: Report | None = None
        self._spoken = -1
        self._anchors: set[Key] = set()
        self._questioned: dict[int, tuple[int, dict[int, str]]] = {}
        self._doubted, self._doubted_at = "", 0
        self._differed: dict[int, dict[int, str]] = {}
        self._agreed: dict[str, frozenset[int]] = {}
        self._strangers: dict[str, frozenset[int]] = {}
        self._accused: dict[str, dict[int, str]] = {}
        self._unlike: set[str] = set()

    @property
    def safe(self) -> Key | None:
        return self.verdict.safe

    @property
    def connected(self) -> bool:
        return self._hub is not None or (self._link is not None and self._link.up)

    def assign(self, assignment: Assignment, safe: Key | None, *, new: bool) -> None:
        options = self._services.options
        is_hub = assignment.hub is None or assignment.hub.node_id == options.node_id
        if new:
            self._remember_question()
            self._generation = assignment.generation
            self.verdict = Verdict(number=-1, safe=safe)
            self._reported, self._spoken = None, -1
            self._hub = None
            self._listeners.clear()
        if is_hub:
            self._leave()
            members = frozenset(assignment.members) or frozenset({options.node_id})
            if self._hub is None:
                self._hub = Hub(
                    members=members,
                    safe=safe,
                    durable_interval=options.durable_every,
                    keep=options.durable_keep,
                    certifier=self._certifier(members, safe) if options.compare != "off" else None,
                )
            self._hub.members = members
            if self._hub.certifier is not None:
                self._hub.certifier.members = members
            self._take_early()
        elif self._link is None or self._link.peer != assignment.hub:
            self._leave()
            assert assignment.hub is not None
            self._link = Link(
                self._services,
                assignment.hub,
                lambda: self._generation,
                on_up=lambda _: self._say(),
                on_down=lambda _: None,
                on_message=self._hear_verdict,
            )
        else:
            self._say()

    def report(self, report: Report) -> None:
        """Tells the hub, if there is anything new."""
        if report != self._reported:
            self._reported = report
            self._say()

    def hear_report(self, channel: Channel, node_id: str, message: Message) -> None:
        """Another vault tells this one, the hub, what it has. Raises RecordError."""
        report = _report_from_plain(node_id, message["what"])
        generation = message["generation"]
        if generation == self._generation and self._hub is not None:
            fresh = channel not in self._listeners
            self._listeners[channel] = node_id
            self._judge(self._hub.report(report), to=channel if fresh else None)
        elif generation >= self._generation and len(self._early) < _MAX_EARLY:
            self._early[node_id] = (generation, report, channel)

    def forget(self, channel: Channel) -> None:
        self._listeners.pop(channel, None)

    def part(self) -> None:
        """This vault has no agent any more: it reports nothing and decides nothing, until it is assigned anew."""
        self._leave()
        self._hub = None
        self._listeners.clear()

    def close(self) -> None:
        self._leave()

    # -- inside

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _take_early(self) -> None:
        early, self._early = self._early, {}
        assert self._hub is not None
        for node_id, (generation, report, channel) in early.items():
            if generation == self._generation and not channel.closed:
                self._listeners[channel] = node_id
                self._judge(self._hub.report(report), to=channel)
            elif generation > self._generation:
                self._early[node_id] = (generation, report, channel)

    def _say(self) -> None:
        report = self._reported
        if report is None:
            return
        if self._hub is not None:
            self._judge(self._hub.report(report))
        elif self._link is not None:
            what = {
                "whole": sorted(report.whole),
                "seen": sorted(report.seen),
                "floor": report.floor,
                "durable": sorted(report.durable),
                "ranks": report.ranks,
                "prints": prints_to_plain(report.prints),
                "replays": [[rank, asdict(replayed)] for rank, replayed in report.replays],
                "room": report.room,
            }
            self._link.send({"op": "tell", "generation": self._generation, "what": what})

    def _certifier(self, members: frozenset[str], safe: Key | None) -> Certifier:
        found = {step: digests for step, (_, digests) in self._questioned.items() if safe is None or step > safe.step}
        return Certifier(
            members=members,
            origin=self._generation,
            base=safe,
            certified=safe in self._anchors,
            holds_back=self._services.options.compare == "hold",
            questioned={step: dict(digests) for step, digests in found.items()},
            differed={step: dict(digests) for step, digests in self._differed.items()},
            doubted=self._doubted,
            doubted_at=self._doubted_at,
            agreed=self._agreed,
            strangers=self._strangers,
            accused=self._accused,
            unlike=self._unlike,
        )

    def _remember_question(self) -> None:
        """Equals have differed and nobody could say who was wrong: the same steps may come again."""
        undecided = self._hub.certifier.undecided if self._hub is not None and self._hub.certifier is not None else None
        if undecided is not None:
            key, digests = undecided
            self._questioned = {key.step: (key.origin, digests)}
        first = (
            self._hub.certifier.first_difference if self._hub is not None and self._hub.certifier is not None else None
        )
        if first is not None:
            self._differed = {first[0].step: dict(first[1])}

    def _tell_findings(self) -> None:
        certifier = self._hub.certifier if self._hub is not None else None
        if certifier is None:
            return
        findings, certifier.findings = certifier.findings, []
        for finding in findings:
            self._tell_finding(finding)
        told, certifier.told = certifier.told, []
        for covered in told:
            self._tell_covered(covered)

    def _tell_finding(self, finding: Finding) -> None:
        then = self._questioned.pop(finding.key.step, None) if finding.check == "again" else None
        if finding.check in ("replay", "cleared"):
            self._doubted = part_name(finding.what) if finding.check == "replay" else ""
            self._doubted_at = finding.key.step
        fields = {
            "check": finding.check,
            "step": finding.key.step,
            "origin": finding.key.origin,
            "groups": [list(ranks) for ranks in finding.groups],
            "ranks": list(finding.ranks),
            "what": finding.what,
            "trusted": None if finding.trusted is None else list(finding.trusted),
            "from_start": finding.from_start,
            "then": then[0] if then is not None else finding.key.origin,
        }
        self._services.log(f"equals differ: {fields}")
        self._services.tell("corruption", fields)

    def _tell_covered(self, covered: Covered) -> None:
        fields = {
            "check": covered.check,
            "ranks": list(covered.ranks),
            "alone": list(covered.alone),
            "reason": covered.reason,
        }
        self._services.tell("covered", fields)

    def _judge(self, verdict: Verdict, to: Channel | None = None) -> None:
        """Says a verdict to everybody if it is news, else only ``to`` whom it is."""
        self._tell_findings()
        message = {"op": "verdict", "generation": self._generation, "what": _verdict_to_plain(verdict)}
        if verdict.number == self._spoken:
            if to is not None:
                to.send(message)
            return
        self._spoken = verdict.number
        for channel in list(self._listeners):
            channel.send(message)
        self._take(verdict)

    def _hear_verdict(self, message: Message) -> None:
        if message["op"] != "verdict" or message["generation"] != self._generation:
            return
        try:
            verdict = _verdict_from_plain(message["what"])
        except RecordError as error:
            self._services.log(f"a verdict of the hub is not understood: {error}")
            return
        self._take(verdict)

    def _take(self, verdict: Verdict) -> None:
        if verdict.number <= self.verdict.number:
            return
        moved = verdict.gate != self.verdict.gate
        self.verdict = verdict
        if verdict.anchor is not None:
            self._anchors = {*sorted(self._anchors)[-_MAX_ANCHORS:], verdict.anchor}
        self._on_verdict(verdict, moved)


def whole_keys(by_rank: Sequence[tuple[int, dict[Key, bool]]]) -> tuple[frozenset[Key], frozenset[Key], int]:
    """What a vault has whole, what it has seen, and its floor (``watermark.Report``).

    ``by_rank``: for each local rank the last step it sealed and its keys of this generation, True where every copy that
    is wanted exists, False where that is still awaited.
    """
    seen = frozenset(key for _, keys in by_rank for key in keys)
    whole = frozenset(key for key in seen if all(keys.get(key, False) for _, keys in by_rank))
    newest = max((last for last, _ in by_rank), default=-1)
    open_steps = [key.step for key in seen - whole if all(key in keys or last < key.step for last, keys in by_rank)]
    return whole, seen, min([*open_steps, newest + 1]) - 1


def _report_from_plain(node_id: str, what: dict[str, Any]) -> Report:
    return Report(
        node_id=node_id,
        whole=frozenset(keys_from_plain(what.get("whole"))),
        seen=frozenset(keys_from_plain(what.get("seen"))),
        floor=_whole_number(what, "floor"),
        durable=frozenset(keys_from_plain(what.get("durable"))),
        ranks=tuple(_whole_numbers(what, "ranks")),
        prints=prints_from_plain(what.get("prints")),
        replays=tuple(_replays(what)),
        room=what.get("room") is True,
    )


def _whole_numbers(what: dict[str, Any], name: str) -> list[int]:
    found = what.get(name)
    if not isinstance(found, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in found):
        raise RecordError(f"{name}: expected a list of whole numbers, found {found!r:.80}")
    return found


def _replays(what: dict[str, Any]) -> Iterator[tuple[int, Replayed]]:
    found = what.get("replays")
    if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        raise RecordError(f"replays: expected a list of pairs, found {found!r:.80}")
    for rank, replayed in found:
        if not isinstance(rank, int):
            raise RecordError(f"replays: expected a rank, found {rank!r:.80}")
        yield rank, replayed_from_plain(replayed)


def _verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "number": verdict.number,
        "safe": verdict.safe,
        "dead": verdict.dead,
        "dead_up_to": verdict.dead_up_to,
        "gate": verdict.gate,
        "persist": verdict.persist,
        "delete": verdict.delete,
        "kept": verdict.kept,
        "anchor": verdict.anchor,
        "verified": verdict.verified,
    }


def _verdict_from_plain(what: dict[str, Any]) -> Verdict:
    return Verdict(
        number=_whole_number(what, "number"),
        safe=key_from_plain(what.get("safe")),
        dead=keys_from_plain(what.get("dead")),
        dead_up_to=_whole_number(what, "dead_up_to"),
        gate=_whole_number(what, "gate"),
        persist=keys_from_plain(what.get("persist")),
        delete=keys_from_plain(what.get("delete")),
        kept=keys_from_plain(what.get("kept")),
        anchor=key_from_plain(what.get("anchor")),
        verified=keys_from_plain(what.get("verified")),
    )


def _whole_number(what: dict[str, Any], name: str) -> int:
    found = what.get(name)
    if not isinstance(found, int) or isinstance(found, bool):
        raise RecordError(f"{name}: expected a whole number, found {found!r:.80}")
    return found
