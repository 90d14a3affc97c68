"""Names and manifests of the durable tier.

    DIRECTORY/RUN/step-000000000100-g000003/rank-000007.safetensors   own + shared
                                           /rank-000007.log
                                           /rank-000007.json          the manifest

Rules:

1. An image exists when its manifest does: it is written last, and says which bytes it stands for. A manifest is only
   believed if its own check sum, its place, its run and the sizes of the files agree.
2. RUN is made from the run id, whatever characters that has: a readable beginning, and a hash that tells runs apart.
3. What begins with a dot is not there yet, or not any more.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final, Literal

import xxhash

from lmres.errors import RecordError
from lmres.gemini.inventory import PART_NAMES, Copy, Key, Part

FORMAT = "lmres-image"
VERSION = 1
MAX_MANIFEST_BYTES = 64 << 10
TEMPORARY = ".part-"
REMOVED = ".gone-"

Kind = Literal["safetensors", "log", "json"]
DATA: Final = "safetensors"
LOG: Final = "log"
MANIFEST: Final = "json"

_STEP = re.compile(r"step-(\d{12,19})-g(\d{6,18})")
_RANK = re.compile(r"rank-(\d{6,18})\.(safetensors|log|json)")


def run_folder(directory: str | Path, run_id: str) -> Path:
    """The folder of a run. Equal only for equal run ids; always directly inside ``directory``."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", run_id)[:32].strip("-") or "run"
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return Path(directory) / f"{readable}-{digest}"


def step_folder_name(key: Key) -> str:
    return f"step-{key.step:012d}-g{key.origin:06d}"


def file_name(rank: int, kind: Kind) -> str:
    return f"rank-{rank:06d}.{kind}"


def parse_step_folder(name: str) -> Key | None:
    """The key whose folder has this name. Other spellings of the same numbers are not ours."""
    found = _STEP.fullmatch(name)
    key = Key(int(found[1]), int(found[2])) if found else None
    return key if key is not None and step_folder_name(key) == name else None


def parse_file_name(name: str) -> tuple[int, str] | None:
    """Rank and kind."""
    found = _RANK.fullmatch(name)
    if found is None:
        return None
    rank = int(found[1])
    return (rank, found[2]) if f"rank-{rank:06d}.{found[2]}" == name else None


def encode_manifest(run_id: str, image: Copy) -> bytes:
    said: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "run_id": run_id,
        "rank": image.rank,
        "step": image.step,
        "origin": image.origin,
        "topology": image.topology,
        "finite": image.finite,
        "trust": image.trust,
        "parts": {name: {"xxh3_128": part.digest, "length": part.length} for name, part in image.parts()},
    }
    return json.dumps({**said, "check": _check(said)}, indent=1).encode() + b"\n"


def decode_manifest(data: bytes, *, run_id: str, key: Key, rank: int) -> Copy:
    """The image a manifest stands for; ``RecordError`` says why it is not believed."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"it is no JSON: {error}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise RecordError(f"it is no {FORMAT}")
    if said.get("version") != VERSION:
        raise RecordError(f"it has version {said.get('version')!r:.40}, only {VERSION} is known here")
    if said.pop("check", None) != _check(said):
        raise RecordError("its check sum is wrong")
    if said.get("run_id") != run_id:
        raise RecordError(f"it belongs to the run {said.get('run_id')!r:.100}")
    try:
        image = _image(said)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"it is not complete: {error!r:.200}") from None
    if (image.key, image.rank) != (key, rank):
        raise RecordError(f"it says {image.key}, rank {image.rank}, and lies at {key}, rank {rank}")
    return image


def _image(said: dict[str, Any]) -> Copy:
    parts = {}
    for name in PART_NAMES:
        part = said["parts"][name]
        if type(part["length"]) is not int or type(part["xxh3_128"]) is not str:
            raise ValueError(f"the {name} part is {part!r:.80}")
        parts[name] = Part(digest=part["xxh3_128"], length=part["length"])
    for name, kind in (("rank", int), ("step", int), ("origin", int), ("topology", str), ("finite", bool)):
        if type(said[name]) is not kind:
            raise ValueError(f"{name} is {said[name]!r:.80}")
    if said["trust"] not in {"unverified", "verified"}:
        raise ValueError(f"trust is {said['trust']!r:.80}")
    return Copy(
        rank=said["rank"],
        step=said["step"],
        origin=said["origin"],
        shared=parts["shared"],
        own=parts["own"],
        log=parts["log"],
        has=PART_NAMES,
        place="durable",
        finite=said["finite"],
        trust=said["trust"],
        topology=said["topology"],
    )


def _check(said: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())
