"""Which modules of this process came from the standard library or an installed package, and telling the agent.

A worker that has made its first steps has imported what its program needs. Those names, in the order in which they
were first imported, are what a warm worker imports beforehand (``warm_main``). The program's own modules are never
among them: whatever does not lie in the standard library or a site folder counts as the program's.
"""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from lmres.adapters.bootstrap.session import Session

MAX_NAMES = 8000
MAX_NAMES_BYTES = 1 << 20
MAX_REPORT_BYTES = 60 * 1024  # the agent reads lines of 64 KiB


class Places:
    """The folders of the standard library, of installed packages, and of this package."""

    def __init__(self) -> None:
        library = os.path.dirname(os.path.abspath(os.__file__))  # noqa: PTH100, PTH120 (no pathlib in a worker)
        ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
        self.site = [folder for folder in site.getsitepackages() if os.path.isdir(folder)]  # noqa: PTH112
        if site.ENABLE_USER_SITE:
            self.site.append(site.getusersitepackages())
        self.library = _prefixes([library])
        self._known = _prefixes([library, ours, *self.site])

    def has(self, spec: Any) -> bool:
        """Whether the module of this ``ModuleSpec`` is none of the program's."""
        origin = spec.origin
        if isinstance(origin, str) and origin not in ("built-in", "frozen", "namespace"):
            return origin.startswith(self._known)
        # Built in, frozen, made by its package's own loader, or a package without a file of its own.
        where = [str(folder) for folder in spec.submodule_search_locations or ()]
        return all(folder.startswith(self._known) for folder in where)


def _prefixes(folders: list[str]) -> tuple[str, ...]:
    found = {form.rstrip(os.sep) + os.sep for folder in folders for form in (folder, os.path.realpath(folder))}
    return tuple(sorted(found))


def installed_modules() -> list[str]:
    """Names in ``sys.modules`` that are none of the program's, in order of their first import; bounded."""
    places = Places()
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")  # a lazy module may answer getattr with an import
        if spec is None or spec.name != name or name.partition(".")[0] in ("lmres", "__main__", "sitecustomize"):
            continue
        if places.has(spec):
            names.append(name)
    return names[:MAX_NAMES]


def pack(names: Sequence[str]) -> bytes | None:
    """Base64 of zlib of the names joined by spaces; None if that is too long to be sent."""
    import binascii
    import zlib

    packed = binascii.b2a_base64(zlib.compress(" ".join(names).encode()), newline=False)
    return packed if len(packed) <= MAX_REPORT_BYTES else None


def unpack(text: Any) -> tuple[str, ...]:
    """What was packed; empty if it is nothing of the kind."""
    import binascii
    import zlib

    try:
        packed = binascii.a2b_base64(text)
        names = zlib.decompressobj().decompress(packed, MAX_NAMES_BYTES).decode("utf-8").split(" ")
    except (TypeError, ValueError, zlib.error):
        return ()
    return tuple(name for name in names if all(part.isidentifier() for part in name.split(".")))


def report(session: Session) -> None:
    """Send the names to the agent: ``{"kind": "modules", "names": PACKED}``.

    About a millisecond; never raises.
    """
    try:
        packed = pack(installed_modules())
        if packed is not None:
            session.send(b'{"kind": "modules", "names": "%s"}' % packed)
    except Exception as error:
        sys.stderr.write(f"lmres: the imported modules are not reported: {error!r}\n")
