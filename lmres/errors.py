"""The error tree, named for what a caller can do about it.

Each error that ends an agent knows its process exit code, so that a scheduler can act on the code alone.
A message says what was found, what was expected and what to do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of an agent (a torchrun process) and of the ``lmres`` command."""

    SUCCEEDED = 0
    TRAINING_FAILED = 1
    BAD_CONFIGURATION = 64
    QUARANTINED = 69
    NO_SUCH_RUN = 69
    INFRASTRUCTURE_LOST = 75
    NO_PROGRESS = 76


class LmresError(Exception):
    """Root of everything this package raises on purpose."""

    exit_code: ExitCode = ExitCode.TRAINING_FAILED


class ConfigError(LmresError):
    """An option, a policy or the environment is wrong: correct it and start again."""

    exit_code = ExitCode.BAD_CONFIGURATION


class RecordError(LmresError):
    """A record read from a store or a socket is torn or not ours: it is ignored and reported, never acted on."""


class StoreError(LmresError):
    """Root of the store's errors."""


class StoreUnavailable(StoreError):
    """The store gave no answer in time. A write may or may not have happened: read again before acting."""


class StoreRefused(StoreUnavailable):
    """Nobody listens at the store's endpoint."""


class StoreProtocolError(StoreError):
    """What answers at the endpoint is not a store of this package, or of another version: check the endpoint."""


class StoreLost(StoreError):
    """The store stayed out of reach for longer than allowed: this agent stops its workers and ends."""

    exit_code = ExitCode.INFRASTRUCTURE_LOST


class VaultError(LmresError):
    """The state in memory can not be kept, read or copied: training goes on, the next source is tried."""


class TransferError(VaultError):
    """A part did not come whole from a peer: nothing of it counts, another holder is asked."""


class PartMissing(TransferError):
    """The peer answers, but has no part with this digest (any more): ask another holder."""


class DigestMismatch(TransferError):
    """The bytes that came are not those of the digest: this copy is not used again."""


class DurableError(VaultError):
    """A file of the durable tier could not be written or read: older files stay as they were."""


class CaptureError(LmresError):
    """The training state can not be captured, or does not fit this program: protection goes off, training goes on."""


class StateError(VaultError):
    """The state of a step can not be had whole on this host: an older one, or another source, is taken."""


class ResumeError(LmresError):
    """The program can not be brought back to its step as it was. It is stopped rather than continued wrongly."""
