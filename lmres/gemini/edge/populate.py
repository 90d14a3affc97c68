"""Making and dropping the page table entries of a mapping, apart from whoever copies there.

``madvise`` of the C library rather than of ``mmap``: the calls take long and must not hold the interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PIECE_BYTES = 32 << 20


def populate(view: memoryview) -> bool:
    """Makes all pages and entries of ``view``, which begins at the start of a mapping and is writable.

    False if this system can not. Raises OSError when there is no memory.
    """
    return _advise(view, _POPULATE_WRITE)


def forget(view: memoryview) -> bool:
    """Drops the entries; what was written stays in the file. Taking the mapping down is quick then."""
    return _advise(view, mmap.MADV_DONTNEED)


def _advise(view: memoryview, advice: int) -> bool:
    if not len(view):
        return True
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    holder = ctypes.c_char.from_buffer(view)
    address = ctypes.addressof(holder)
    try:
        for start in range(0, len(view), _PIECE_BYTES):
            if madvise(address + start, min(_PIECE_BYTES, len(view) - start), advice):
                code = ctypes.get_errno()
                if code in (errno.EINVAL, errno.ENOSYS):
                    return False
                raise OSError(code, os.strerror(code))
    finally:
        del holder
    return True
