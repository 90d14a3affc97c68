"""A module of the program that is not on the stack when a forward begins."""

import torch

_history = torch.zeros(4)
_count = 0


def record(value):
    global _count, _history
    _count += 1
    _history = torch.cat([_history[1:], value.reshape(1)])


def told():
    return _count, _history.tolist()
