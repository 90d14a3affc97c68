"""What a worker notes of itself for those who look from outside: see ``marks``. Importing this changes nothing."""

from lmres.adapters.watch.settings import VARIABLE, variable_text

__all__ = ["VARIABLE", "variable_text"]
