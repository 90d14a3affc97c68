"""Reads the policy from its file: the one place where a path becomes a ``Policy``."""

from __future__ import annotations

from pathlib import Path

from lmres.errors import ConfigError
from lmres.policy import Policy, parse_policy
from lmres.strict_yaml import MAX_CHARS

MAX_BYTES = 4 * MAX_CHARS


def load_policy(path: str | Path | None) -> Policy:
    """The policy of a file, or the default one without a file. Raises ConfigError."""
    if path is None:
        return Policy()
    try:
        with Path(path).expanduser().open("rb") as file:
            # Bounded: the path may be a device or a checkpoint given by mistake.
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"policy {path}: can not be read ({error}); give the path of a readable file") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"policy {path}: found more than {MAX_BYTES} bytes; this is no policy file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"policy {path}: line {line} is not UTF-8; save the file as UTF-8") from error
    return parse_policy(text, source=str(path))
