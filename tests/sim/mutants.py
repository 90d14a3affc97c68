from __future__ import annotations
from contextlib import contextmanager
MUTANTS: dict = {}
@contextmanager
def planted(name):
    yield
