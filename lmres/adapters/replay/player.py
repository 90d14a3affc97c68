"""Computes one part of the model anew, at an interval, and says what came of it.

Rules:

1. At a boundary, on the program's own modules, parameters and modes, with inputs made up from the step and the part:
   all equals compute the same, and none needs the other's data.
2. Nothing is left behind: the generators are put back, buffers are stand-ins meanwhile, gradients are asked for by
   value (``torch.autograd.grad``), so that nothing accumulates and no reducer of DDP is told.
3. Twice, so that what happened once is told from what is wrong. What does not come out the same twice, and goes on so,
   is not covered.
4. The shapes are those of the largest inputs seen, with a small batch where the part allows it: so ranks whose batches
   differ compute the same too, and it costs less.
5. A part that fails is left out, and that is said; the program never sees it.

Inputs are looked at by a hook on the module in the step before, and on all modules in the first step of a life.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from lmres.adapters.replay import machine
from lmres.adapters.replay.parts import Like, Part, Parts, embedding_size

LARGEST_BATCH = 8
MAX_REASONS = 3

Tell = Callable[..., None]


class Player:
    """``tell`` gets the keywords of ``WorkerVault.replayed``. ``covered`` is called once with how many of how many
    modules, and why not the others."""

    def __init__(self, torch: Any, every: int, *, tell: Tell, covered: Callable[[int, int, str], None]) -> None:
        self._torch = torch
        self._every = every
        self._tell = tell
        self._covered = covered
        self._parts: Parts | None = None
        self._turn: list[Part] | None = None
        self._learns_from = 0
        self._hooks: list[Any] = []

    def end_looking(self) -> None:
        """The step whose inputs were looked at is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def at_boundary(self, step: int, roots: list[Any], arguments: tuple[Any, Any], kept_rng: Any) -> None:
        """``arguments``: of the forward that begins. ``kept_rng``: a context that puts the generators back."""
        if self._parts is None:
            self._parts = Parts.of(self._torch, roots)
            self._look(self._parts.all, arguments)
            return
        if self._turn is None:
            self._turn = self._parts.covered
            problems = [f"{part.name}: {part.problem or 'it was not called'}" for part in self._parts.all]
            problems = [text for text, part in zip(problems, self._parts.all, strict=True) if part not in self._turn]
            more = f"; and {len(problems) - MAX_REASONS} more" if len(problems) > MAX_REASONS else ""
            self._covered(len(self._turn), len(self._parts.all), "; ".join(problems[:MAX_REASONS]) + more)
            self._learns_from = step
        if not self._turn:
            return
        index = self._index(step)
        if index is not None:
            self._play(step, index, kept_rng)
        coming = self._index(step + 1)
        if coming is not None:
            self._look([self._turn[coming]], arguments)

    def _index(self, step: int) -> int | None:
        """The part that is computed at this boundary. First each of them once, one a step: then all equals know of each
        other that they do compute the same."""
        assert self._turn
        count = step - self._learns_from
        if count < len(self._turn):
            return count
        return step // self._every % len(self._turn) if step % self._every == 0 else None

    def _look(self, parts: list[Part], arguments: tuple[Any, Any]) -> None:
        assert self._parts is not None
        found = self._parts
        found.batch = max(found.batch, _batch(self._torch, arguments))
        for part in parts:
            if not part.problem:
                look = _Looker(found, part)
                look.handle = part.module.register_forward_pre_hook(look, with_kwargs=True)
                self._hooks.append(look.handle)

    def _play(self, step: int, index: int, kept_rng: Any) -> None:
        assert self._turn is not None
        part = self._turn[index]
        what, digest, steady = "", "", True
        if not part.problem:
            what, digest, steady = self._guarded(part, step, kept_rng)
        self._tell(step=step, part=index, parts=len(self._turn), what=what, digest=digest, steady=steady)

    def _guarded(self, part: Part, step: int, kept_rng: Any) -> tuple[str, str, bool]:
        found = "", "", True
        try:
            part.problem = part.problem_now(self._torch)
            module = None if part.problem else part.to_compute(self._torch)
            if module is not None:
                with kept_rng, _kept_cuda(self._torch), _stand_ins(self._torch, module), _exact(self._torch):
                    found = self._compute(part, module, step)
        except Exception as error:  # of the program's module; the program never sees it
            part.problem = f"computing it anew failed: {error!r:.200}"
        if part.problem and self._turn is not None and self._parts is not None:
            left = len([p for p in self._turn if not p.problem])
            self._covered(left, len(self._parts.all), f"{part.name}: {part.problem}")
        return found

    def _compute(self, part: Part, module: Any, step: int) -> tuple[str, str, bool]:
        assert part.seen is not None and self._parts is not None
        leaves, tree, _ = part.seen
        batch = self._parts.batch
        small = [_with_batch(leaf, batch, _smaller(batch)) for leaf in leaves]
        used, first = small, ""
        try:
            first = self._once(part, module, small, tree, step)
        except Exception:
            if small == leaves:
                raise
            used, first = leaves, self._once(part, module, leaves, tree, step)
        results = [first, self._once(part, module, used, tree, step)]
        steady = results[0] == results[1]
        if not steady:
            results += [self._once(part, module, used, tree, step) for _ in range(2)]
            if results[2] != results[3] or results[2] not in results[:2]:
                part.problem = "it does not come out the same twice"
                return "", "", True
        return self._what(part, module, used), results[-1], steady

    def _what(self, part: Part, module: Any, leaves: list[Any]) -> str:
        shapes = ", ".join(_shape(leaf) for leaf in leaves if isinstance(leaf, Like))
        torch, device = self._torch, next((leaf.device.type for leaf in leaves if isinstance(leaf, Like)), "cpu")
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        buffers = _digest(torch, list(_telling_buffers(torch, module)))
        plain = [leaf for leaf in leaves if not isinstance(leaf, Like)]
        rest = repr((plain, module.training, str(cast), buffers, _own_values(torch, module)))
        kind = xxhash.xxh3_64_hexdigest(f"{rest} {machine.kind(torch)}".encode())
        return f"{part.name} ({type(module).__name__}) of {shapes or 'nothing'}|{kind}"

    def _once(self, part: Part, module: Any, leaves: list[Any], tree: Any, step: int) -> str:
        """The digest of what it gives and of all gradients."""
        from torch.utils import _pytree as pytree

        torch = self._torch
        seed = int.from_bytes(xxhash.xxh3_64_digest(f"{step} {part.name}".encode())[:6], "little")
        torch.manual_seed(seed)
        made = _Made(torch, seed, embedding_size(torch, module))
        inputs = [made.like(leaf) if isinstance(leaf, Like) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(inputs, tree)
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Like)), "cpu")
        cast = torch.autocast(
            device,
            enabled=torch.is_autocast_enabled(device),
            dtype=torch.get_autocast_dtype(device),
            cache_enabled=False,
        )
        with torch.enable_grad(), cast:
            given = module(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(given) if torch.is_tensor(leaf)]
        differentiable = [leaf for leaf in outputs if leaf.requires_grad and leaf.is_floating_point()]
        wanted = [leaf for leaf in inputs if torch.is_tensor(leaf) and leaf.requires_grad]
        wanted += [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients: tuple[Any, ...] = ()
        if differentiable and wanted:
            weights = [made.like(Like(tuple(o.shape), o.dtype, o.device, False), floating=True) for o in differentiable]
            gradients = torch.autograd.grad(differentiable, wanted, weights, allow_unused=True)
        return _digest(torch, [*outputs, *gradients])


class _Looker:
    """A hook that notes what a module is called with, the first time."""

    def __init__(self, parts: Parts, part: Part) -> None:
        self._parts = parts
        self._part = part
        self.handle: Any = None

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        with contextlib.suppress(Exception):
            self.handle.remove()
            self._parts.look(self._part, args, kwargs)


class _Made:
    """Tensors out of a seed, on each device from a generator of its own."""

    def __init__(self, torch: Any, seed: int, below: int | None) -> None:
        self._torch = torch
        self._seed = seed
        self._below = below or 1
        self._generators: dict[Any, Any] = {}

    def like(self, like: Like, *, floating: bool = False) -> Any:
        torch = self._torch
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device)
            generator.manual_seed(self._seed)
        if not like.grad and not floating:
            return torch.randint(self._below, like.shape, generator=generator, device=like.device, dtype=like.dtype)
        wide = torch.float32 if like.dtype.itemsize == 1 else like.dtype
        tensor = torch.randn(like.shape, generator=generator, device=like.device, dtype=wide).to(like.dtype)
        return tensor.requires_grad_(like.grad)


@contextlib.contextmanager
def _stand_ins(torch: Any, module: Any) -> Iterator[None]:
    """Copies in place of the buffers."""
    kept = [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    copies: dict[int, Any] = {}
    try:
        with torch.no_grad():
            for buffers, name, buffer in kept:
                buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer


@contextlib.contextmanager
def _kept_cuda(torch: Any) -> Iterator[None]:
    """The generators of the devices in use are put back."""
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if states is not None:
            torch.cuda.set_rng_state_all(states)


@contextlib.contextmanager
def _exact(torch: Any) -> Iterator[None]:
    """Deterministic kernels, where there are any."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
            cudnn.benchmark, cudnn.deterministic = False, True
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = flags
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _digest(torch: Any, tensors: list[Any]) -> str:
    hasher = xxhash.xxh3_128()
    with torch.no_grad():
        for tensor in tensors:
            if tensor is None:
                hasher.update(b"none")
                continue
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
            size = flat.numel() * flat.element_size()
            memory = (ctypes.c_char * size).from_address(flat.data_ptr()) if size else b"empty"
            hasher.update(memoryview(memory))
    return hasher.hexdigest()


def _telling_buffers(torch: Any, module: Any) -> Iterator[Any]:
    """Those that show in what it computes. Ranks may have others, and are then not compared; the running statistics of
    a normalisation, which each rank has of its own, do not show while it is trained."""
    for each in module.modules():
        if not (each.training and isinstance(each, torch.nn.modules.batchnorm._NormBase)):
            yield from (buffer for buffer in each._buffers.values() if buffer is not None)


def _own_values(torch: Any, module: Any) -> list[Any]:
    """Plain numbers and tensors that the modules hold beside parameters and buffers: ranks may come to hold others, and
    are then not compared. Whole numbers name ranks and sizes, and do not count."""
    found: list[Any] = []
    for each in module.modules():
        for name in sorted(vars(each)):
            value = vars(each)[name]
            if name == "training" or (name.startswith("_") and not isinstance(value, float)):
                continue
            if isinstance(value, (bool, float)):
                found.append((name, repr(value)))
            elif torch.is_tensor(value):
                found.append((name, _digest(torch, [value])))
    return found


def _batch(torch: Any, arguments: tuple[Any, Any]) -> int:
    from torch.utils import _pytree as pytree

    return next((len(leaf) for leaf in pytree.tree_leaves(arguments) if torch.is_tensor(leaf) and leaf.dim()), 0)


def _smaller(batch: int) -> int:
    """The power of two that is not above it, within a limit."""
    return min(LARGEST_BATCH, 1 << max(0, batch.bit_length() - 1))


def _with_batch(leaf: Any, batch: int, small: int) -> Any:
    if isinstance(leaf, Like) and leaf.shape and leaf.shape[0] == batch:
        return Like((small, *leaf.shape[1:]), leaf.dtype, leaf.device, leaf.grad)
    return leaf


def _shape(like: Like) -> str:
    return "x".join(map(str, like.shape)) + f" {str(like.dtype).removeprefix('torch.')}"
