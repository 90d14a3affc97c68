"""Takes the program's state at a boundary, and puts it back: between the engine, the capture and the vault.

What is captured beside model, optimizer and generators: the tensors, arrays and generators in the program's frames,
the arguments of the forward that begins, the loaders' notes, and the plain values for the certificate.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

from lmres.adapters.resume import attributes, clocks, frames, rng
from lmres.adapters.resume.certificate import WAYS_OUT, Difference, OwnStart, differences, same, summary, variable
from lmres.adapters.resume.constants import Constants
from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.journal import Journal, JournalError, Mark, Replay
from lmres.adapters.resume.pace import Pace
from lmres.adapters.resume.patches.loaders import Loaders
from lmres.adapters.resume.settings import Settings
from lmres.adapters.resume.standing import Asker, CanNotSave, Standing
from lmres.errors import LmresError, ResumeError, StateError, VaultError

if TYPE_CHECKING:
    from lmres.adapters.replay.player import Player

RESERVE_ROOM = 1.25
RESERVE_EXTRA_BYTES = 256 * 1024
RNG_NOTES = "states of the generators"
FIRST_NOTES = "values when the loop began"
KNOWN_FOR = 256
LIFE_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "LMRES_GENERATION",
    "LMRES_RESUME_STEP",
    "LMRES_NODE_ID",
    "LMRES_STATE_DIR",
    "LMRES_RESTART_CONTEXT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capture:
    """One that is under way. ``blocked_s``: how long the program has stood still for it before the copy began."""

    grant: Any
    step: int
    layout: Any
    equals: str
    log_length: int
    copy: Any
    blocked_s: float


class Report(Protocol):
    """Tells the agent; each call is one message."""

    def captured(self, step: int, size: int, blocking_ms: float) -> None: ...
    def restored(self, step: int, source: str, size: int, duration_ms: float) -> None: ...
    def elsewhere(self, step: int, captured: int) -> None: ...
    def nonfinite(self, step: int) -> None: ...
    def off(self, reason: str) -> None: ...
    def armed(self, adapter: str, parts: list[str]) -> None: ...
    def replays(self, covered: int, modules: int, reason: str) -> None: ...


class StateKeeper:
    """The engine's ``Keeper``."""

    def __init__(
        self,
        torch: Any,
        engine: Engine,
        settings: Settings,
        vault: Any,
        restored: Any,
        loaders: Loaders,
        report: Report,
        asker: Asker | None = None,
    ) -> None:
        """``vault``: a ``WorkerVault``. ``restored``: what it has for this generation, None at the beginning.
        ``asker``: who may ask to stand still."""
        from lmres.adapters.capture import copy as copying
        from lmres.adapters.capture.collect import Collector
        from lmres.adapters.capture.equals import Equals
        from lmres.adapters.replay import machine
        from lmres.adapters.replay.player import Player

        self.states: dict[str, Any] = {}
        """What the program has added, by name."""
        self.capture_next = False
        """Whatever the interval, the next boundary is captured."""
        self._torch = torch
        self._engine = engine
        self._settings = settings
        self._vault = vault
        self._restored = restored
        self._loaders = loaders
        self._report = report
        self._standing = Standing(asker) if asker is not None else None
        self._saved_step = self._spoilt_step = -1
        self._copier = copying.Copier()
        self._collector = Collector()
        self._equals = Equals(lambda: machine.kind(torch))
        self._player: Player | None = None
        if settings.replay_every:
            self._player = Player(torch, settings.replay_every, tell=vault.replayed, covered=report.replays)
        self._pace = Pace(settings.interval_steps, settings.overhead_budget)
        self._constants = Constants()
        self._first_values: dict[str, Any] = {}
        self._first_notes: Any = None
        self._modules: _Modules | None = None
        self._layout: Any = None
        self._asked: tuple[int, int] | None = None
        self._pending: _Capture | None = None
        self._last_boundary: float | None = None
        self._armed = False
        self._initial_rng = rng.pack(rng.get_rng(torch))

    # -- the beginning of a life --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before any code of the program's: its generators begin as in the first life. Raises StateError."""
        engine, restored = self._engine, self._restored
        if restored is None:
            engine.journal = Journal(self._vault.log)
            return
        from lmres.adapters.capture import restore

        try:
            self._loaded = restore.read(restored.own, restored.shared)
            self._then: Mapping[str, Any] = json.loads(self._loaded.meta["extra"])
            engine.replay = Replay(self._vault.log, restored.log_length)
            notes = self._note(RNG_NOTES)
            self._read_values(json.loads(self._note(FIRST_NOTES)))
            size = int(self._then["initial_rng"])
            self._initial_rng = notes[:size]
            rng.set_rng(self._torch, rng.unpack(self._torch, self._initial_rng))
            self._loaders.want(self._then["loaders"], notes[size:])
        except (LmresError, JournalError, KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state of step {restored.step} can not be read: {error!r}") from error

    def _note(self, name: str) -> bytes:
        """Of what was captured."""
        found = self._loaded.tensors[dict(self._loaded.meta["extra_tensors"])[name]]
        return ctypes.string_at(found.data_ptr(), found.numel())  # NumPy need not be there

    def _read_values(self, first: Mapping[str, Any]) -> None:
        changed, gone = self._then["changed"], frozenset(self._then["gone"])
        self._settled_then = frozenset(p for p in first if p not in changed and p not in gone)
        values = {**{p: v for p, v in first.items() if p not in gone}, **changed}
        self._values_then = {path: _unspell(value) for path, value in values.items()}

    def begun(self, mark: Mark | None) -> None:
        held = self._walk()
        self._constants.begin(held.tensors)
        self._first_values = held.values
        replay = self._engine.replay
        if replay is not None:
            lines = [clocks.clocked_lines(_source(file)) for file in sorted(held.files)]
            replay.loose = frozenset(line & 0xFFFF for found in lines for line in found)
        text = json.dumps({path: _spell(value) for path, value in held.values.items()}, separators=(",", ":"))
        self._first_notes = self._torch.frombuffer(bytearray(text.encode("ascii")), dtype=self._torch.uint8)

    def fingerprint(self) -> int:
        from lmres.adapters.capture.fingerprint import digest, sampled
        from lmres.errors import CaptureError

        try:
            modules = self._known()
            chosen = modules.chosen
            if chosen is None or any(place.get(key) is not tensor for place, key, tensor in chosen[1]):
                chosen = modules.chosen = sampled(self._engine.roots[:1])
            return int(digest(*chosen))
        except CaptureError:  # parameters that get their size in the first forward
            return 0

    def step_of_optimizers(self) -> int | None:
        steps = [
            int(state["step"])
            for optimizer in self._engine.optimizers
            for state in optimizer.state.values()
            if "step" in state
        ]
        return max(steps, default=None)

    def go_on(self, step: int) -> None:
        restored = self._restored
        journal = self._engine.journal = Journal(self._vault.log, restored.log_length)
        journal.void()
        self._report.elsewhere(step, restored.step)

    # -- taking -------------------------------------------------------------------------------------------------------

    def at_boundary(self, step: int, arguments: tuple[Any, Any]) -> None:
        now = time.perf_counter()
        if self._last_boundary is not None:
            self._pace.step_took(now - self._last_boundary)
        self._last_boundary = now
        player = self._player
        if player is not None:
            self._aside(player.end_looking)
        if self._pace.is_due(step) or self.capture_next or self._asked is None:  # memory is asked for at once
            self.capture_next = False
            self._guarded(lambda: self._capture(step, arguments))
        if player is not None:
            kept = rng.kept_rng(self._torch)
            self._aside(lambda: player.at_boundary(step, self._engine.roots, arguments, kept))
        standing = self._standing
        if standing is not None and standing.is_asked(step):
            self._guarded(lambda: standing.stand(step, lambda: self._save(step, arguments)))
            self._last_boundary = time.perf_counter()

    def _save(self, step: int, arguments: tuple[Any, Any]) -> bool:
        """Captures this very step, whatever the interval, and seals it at once; False: not yet."""
        if self._pending is None or self._pending.step != step:
            self._capture(step, arguments)
        if self._pending is None:
            if self._vault.gate > step:
                raise CanNotSave(not_before=self._vault.gate)
            return False
        self._seal()
        if self._spoilt_step == step:
            raise CanNotSave(problem=f"the state of step {step} is not finite")
        return self._saved_step == step

    def before_step(self) -> None:
        if self._pending is not None:
            self._guarded(self._seal)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A part of ours that fails ends the protection, not the training."""
        with self._engine.ours:
            try:
                work()
            except Exception as error:
                self._pending = None
                self._engine.give_up(str(error) if isinstance(error, LmresError) else f"capturing failed: {error!r}")

    def _aside(self, work: Callable[[], None]) -> None:
        """A part of ours that the protection can do without."""
        with self._engine.ours:
            try:
                work()
            except Exception as error:
                self._player = None
                self._report.replays(0, 0, f"it failed: {error!r:.300}")

    def _capture(self, step: int, arguments: tuple[Any, Any]) -> None:
        from lmres.adapters.capture.image import plan_layout

        began = time.perf_counter()
        if self._pending is not None:
            self._seal()
        grant = self._vault.poll_grant(step)
        if grant is None and self._asked is not None:
            return
        snapshot = self._collector.collect(self._state(self._walk(), arguments))
        layout = self._layout = plan_layout(snapshot, self._layout)
        if not self._fits(layout):
            if grant is not None:
                self._vault.discard(grant)
            self._ask(layout.shared_bytes, layout.own_bytes)
            return
        if grant is None or len(grant.own) < layout.own_bytes or len(grant.shared) < layout.shared_bytes:
            return
        blocked_s = time.perf_counter() - began
        journal = self._engine.journal
        self._pending = _Capture(
            grant=grant,
            step=step,
            layout=layout,
            equals=self._equals.text(layout, snapshot.meta["items"]),
            log_length=journal.length if journal is not None else 0,
            copy=self._copier.start(snapshot, layout, shared=grant.shared, own=grant.own),
            blocked_s=blocked_s,
        )

    def _ask(self, shared_bytes: int, own_bytes: int) -> None:
        """For memory, with some to spare."""
        own = int(own_bytes * RESERVE_ROOM) + RESERVE_EXTRA_BYTES
        self._asked = (shared_bytes, own)
        self._vault.reserve(shared_bytes=shared_bytes, own_bytes=own)

    def _fits(self, layout: Any) -> bool:
        asked = self._asked
        return asked is not None and layout.shared_bytes <= asked[0] and layout.own_bytes <= asked[1]

    def _seal(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        copied = pending.copy.finish()
        if copied.torn or not copied.finite:
            self._vault.discard(pending.grant)
            if not copied.finite:
                self._spoilt_step = pending.step
                self._vault.spoilt(pending.step, layout=pending.equals)
                self._report.nonfinite(pending.step)
            return
        blocking_ms = pending.blocked_s * 1000 + copied.blocking_ms
        self._vault.seal(
            pending.grant,
            step=pending.step,
            shared_length=pending.layout.shared_bytes,
            own_length=pending.layout.own_bytes,
            log_length=pending.log_length,
            finite=copied.finite,
            all_finite=copied.all_finite,
            layout=pending.equals,
            topology=self._settings.topology,
            blocking_ms=blocking_ms,
        )
        self._saved_step = pending.step
        self._pace.capture_took(blocking_ms / 1000)
        if not self._armed:
            self._armed = True
            self._report.armed(_adapter(self._engine.roots), ["model", "optimizer", "rng", "loader", "program"])
        self._report.captured(pending.step, pending.layout.total_bytes, blocking_ms)

    # -- what belongs to it -------------------------------------------------------------------------------------------

    def _walk(self) -> frames.Held:
        modules = self._known()
        return frames.walk(self._torch, modules.tensors, modules.modules)

    def _known(self) -> _Modules:
        """Looked at once at each boundary."""
        found, steps = self._modules, self._engine.steps
        if found is None or (found.looked_at != steps and not found.holds(self._engine)):
            found = self._modules = _Modules(self._engine)
        found.looked_at = steps
        return found

    def _state(self, held: frames.Held, arguments: tuple[Any, Any]) -> Any:
        from lmres.adapters.capture.state import State

        torch = self._torch
        tensors = {path: t for path, t in held.tensors.items() if t not in self._constants}
        tensors |= {path: torch.from_numpy(a) for path, a in held.arrays.items() if _is_usable(a)}
        own = {id(t) for t in tensors.values()}
        tensors |= {n: t for n, t in _arguments(torch, arguments).items() if id(t) not in own}
        generators = {p: g for p, g in held.generators.items() if isinstance(g, torch.Generator)}
        table, notes = self._loaders.notes()
        first, values = self._first_values, held.values
        extra = {
            "changed": {
                p: _spell(v)
                for p, v in values.items()
                if p not in first or (v is not first[p] and not same(v, first[p]))
            },
            "gone": [p for p in first if p not in values],
            "tensors": {path: [list(t.shape), str(t.dtype)] for path, t in tensors.items()},
            "generators": sorted(generators),
            "python_generators": {
                path: _generator_state(g) for path, g in held.generators.items() if path not in generators
            },
            "loaders": table,
            "iterators": self._engine.iterators,
            "initial_rng": len(self._initial_rng),
            "life": _life(),
        }
        return State(
            roots=tuple(self._engine.roots),
            optimizers=tuple(self._engine.optimizers),
            schedulers=tuple(self._engine.schedulers),
            scalers=tuple(self._engine.scalers),
            generators=tuple(generators[p] for p in sorted(generators)),
            extra_tensors={
                **{path: t.detach() for path, t in tensors.items()},
                RNG_NOTES: torch.frombuffer(bytearray(self._initial_rng + notes), dtype=torch.uint8),
                FIRST_NOTES: self._first_notes,
            },
            extra=json.dumps(extra, separators=(",", ":")),
            states=dict(self.states),
        )

    # -- putting back -------------------------------------------------------------------------------------------------

    def arrive(self, step: int, arguments: tuple[Any, Any], mark: Mark | None) -> None:
        from lmres.adapters.capture import restore
        from lmres.errors import CaptureError

        began = time.perf_counter()
        then, held = self._then, self._walk()
        if attributes.put_back(
            held.attributes, self._values_then, held.values, settled=self._settled_then, tensors=then["tensors"]
        ):
            held = self._walk()
        found = self._differences(held, arguments, mark) if not self._engine.jump else []
        if found:
            raise ResumeError(
                f"step {step} was reached, but the program does not stand where it stood: {summary(found)}. {WAYS_OUT}"
            )
        try:
            state = self._state_at_arrival(held, arguments)
            restore.apply(state, self._only(state.extra_tensors))
            for path, state in then["python_generators"].items():
                if path in held.generators:
                    _set_generator_state(held.generators[path], state)
        except (CaptureError, KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"the state of step {step} can not be put in place: {error}. {WAYS_OUT}") from error
        self._engine.iterators = int(then["iterators"])
        self._engine.journal = Journal(self._vault.log, self._restored.log_length)
        restored = self._restored
        with contextlib.suppress(VaultError):  # the next capture finds the same, and says so
            self._ask(len(restored.shared), len(restored.own))  # now, so that the next step is captured already
        self._report.restored(step, restored.source, restored.bytes, (time.perf_counter() - began) * 1000)

    def _state_at_arrival(self, held: frames.Held, arguments: tuple[Any, Any]) -> Any:
        """The program's places for what was captured. Where there is none (only after a jump), it is left out."""
        torch, then = self._torch, self._then
        now = self._state(held, arguments)
        places = dict(held.tensors)
        places |= {path: torch.from_numpy(a) for path, a in held.arrays.items() if _is_usable(a)}
        places |= _arguments(torch, arguments)
        kept = {}
        for path, (shape, dtype) in then["tensors"].items():
            place = places.get(path)
            if place is not None and list(place.shape) == shape and str(place.dtype) == dtype:
                kept[path] = place.detach()
        generators = {p: g for p, g in held.generators.items() if isinstance(g, torch.Generator)}
        ordered = tuple(generators[p] for p in then["generators"] if p in generators)
        return replace(now, extra_tensors=kept, generators=ordered)

    def _only(self, names: Mapping[str, Any]) -> Any:
        """What was captured, without the program's tensors that have no place now."""
        loaded = self._loaded
        tensors = [pair for pair in loaded.meta["extra_tensors"] if pair[0] in names]
        return replace(loaded, meta={**loaded.meta, "extra_tensors": tensors})

    def _differences(self, held: frames.Held, arguments: tuple[Any, Any], mark: Mark | None) -> list[Difference]:
        then = self._then
        variables = frozenset(variable(p) for kind in (held.values, held.tensors, held.arrays) for p in kind)
        own_start = None
        if mark is not None:
            own_start = OwnStart(settled_then=self._settled_then, first_now=self._first_values, variables_now=variables)
        names: set[str] = set()
        named_after: set[str] = set(LIFE_VARIABLES)
        for file in held.files:
            source = _source(file)
            names |= clocks.volatile_names(source)
            named_after |= clocks.names_from(source, LIFE_VARIABLES)
        found = differences(
            self._values_then,
            held.values,
            volatile=frozenset(names),
            named_after_life=frozenset(named_after),
            life_then=then["life"],
            life_now=_life(),
            own_start=own_start,
        )
        places = {**held.tensors, **held.arrays, **_arguments(self._torch, arguments)}
        for path, (shape, dtype) in then["tensors"].items():
            place = places.get(path)
            if place is not None and list(place.shape) == shape and _dtype(place) == dtype:
                continue
            if own_start is not None and variable(path) not in variables:
                continue
            now = f"a {_dtype(place)} tensor of shape {list(place.shape)}" if place is not None else "(absent)"
            found.append(Difference(path=path, then=f"a {dtype} tensor of shape {shape}", now=now))
        return found


class _Modules:
    """The modules, parameters and buffers that belong to roots and optimizers, by id.

    They are looked for again when the modules' structure has changed, and now and then. The objects are kept, so that
    no id is used twice meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.looked_at = engine.steps
        self.chosen: Any = None
        """What the parameters' fingerprint is made of."""
        self._left = KNOWN_FOR
        self._owners = [*engine.roots, *engine.optimizers]
        self._kept = list({id(m): m for root in engine.roots for m in root.modules()}.values())
        tensors = [t for m in self._kept for own in (m._parameters, m._buffers) for t in own.values()]
        tensors += [p for optimizer in engine.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._children = [m._modules for m in self._kept]
        self._structure = self._look()
        self._tensors = tensors
        self.tensors = frozenset(map(id, tensors))
        self.modules = frames.Captured(self._kept)

    def holds(self, engine: Engine) -> bool:
        self._left -= 1
        now = [*engine.roots, *engine.optimizers]
        return (
            self._left > 0
            and len(now) == len(self._owners)
            and all(map(is_, now, self._owners))
            and self._look() == self._structure
        )

    def _look(self) -> list[int]:
        found = [id(child) for children in self._children for child in children.values()]
        found += [len(own) for m in self._kept for own in (m._parameters, m._buffers)]
        return found


def _arguments(torch: Any, arguments: tuple[Any, Any]) -> dict[str, Any]:
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(arguments)
    return {f"argument {i}": leaf for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)}


def _dtype(place: Any) -> str:
    name = str(place.dtype)
    return name if name.startswith("torch.") else f"torch.{name}"


def _is_usable(array: Any) -> bool:
    """Whether torch can share the array's memory."""
    return bool(array.flags.writeable) and array.dtype.isnative and all(s >= 0 for s in array.strides)


def _adapter(roots: list[Any]) -> str:
    for root in roots:
        for kind in type(root).__mro__:
            if kind.__name__ == "DistributedDataParallel":
                return "ddp"
            if kind.__name__ == "FSDPModule":
                return "fsdp2"
    return "pytorch"


def _life() -> dict[str, str]:
    """What names this life of the program."""
    life = {name: os.environ.get(name, "") for name in LIFE_VARIABLES}
    return {**life, "pid": str(os.getpid()), "host": socket.gethostname()}


def _source(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as source:
            return source.read()
    except OSError:
        return ""


def _spell(value: Any) -> Any:
    """As JSON; floats exactly."""
    if isinstance(value, float):
        return {"f": value.hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, tuple):
        return {"t": list(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 53:
        return {"i": hex(value)}
    return value


def _unspell(value: Any) -> Any:
    match value:
        case {"f": text}:
            return float.fromhex(text)
        case {"c": [real, imaginary]}:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case {"t": items}:
            return tuple(items)
        case {"i": text}:
            return int(text, 16)
        case _:
            return value


def _generator_state(generator: Any) -> Any:
    """Python's and NumPy's own generators, as JSON."""
    import random

    if isinstance(generator, random.Random):
        version, keys, gauss = generator.getstate()
        return {"python": [version, list(keys), gauss]}
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return {"numpy": _plain_bits(bits.state)}
    return {"numpy_legacy": _plain_bits(generator.get_state(legacy=False))}


def _plain_bits(state: Any) -> Any:
    numpy = sys.modules["numpy"]
    if isinstance(state, dict):
        return {key: _plain_bits(value) for key, value in state.items()}
    if isinstance(state, numpy.ndarray):
        return {"array": [int(v) for v in state], "dtype": str(state.dtype)}
    if isinstance(state, int) and not isinstance(state, bool):
        return {"int": hex(state)}
    return state.item() if hasattr(state, "item") else state


def _unplain_bits(state: Any) -> Any:
    numpy = sys.modules["numpy"]
    match state:
        case {"array": values, "dtype": dtype}:
            return numpy.array(values, dtype=dtype)
        case {"int": text}:
            return int(text, 16)
        case dict():
            return {key: _unplain_bits(value) for key, value in state.items()}
        case _:
            return state


def _set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    if "python" in state:
        version, keys, gauss = state["python"]
        generator.setstate((version, tuple(keys), gauss))
    elif "numpy" in state:
        generator.bit_generator.state = _unplain_bits(state["numpy"])
    else:
        generator.set_state(_unplain_bits(state["numpy_legacy"]))
