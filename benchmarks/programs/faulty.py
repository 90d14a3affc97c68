"""DDP training in which one rank goes wrong, once, when the file ``FAULT_FILE`` is there: in the way of ``FAULT``.

Prints the lines of ``lmres/cli/trial_program.py``, and writes into ``FAULT_FILE.when`` the time at which it went wrong.
Knows nothing of who runs it.
"""

import os
import time
from pathlib import Path

print("life", os.environ["RANK"], os.getpid(), time.time(), flush=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

FAULT, FILE = os.environ.get("FAULT", ""), Path(os.environ["FAULT_FILE"])
RANK = int(os.environ.get("FAULT_RANK", "1"))
FOR_EVER_S = 3600
STEP_S = 0.03
SLOW = 3


def goes_wrong(kind):
    """Once in the run."""
    if kind != FAULT or dist.get_rank() != RANK or not FILE.exists():
        return False
    FILE.unlink()
    FILE.with_suffix(".when").write_text(str(time.time()))
    return True


def is_slow(kind):
    """From when it goes wrong until the process ends: it is its host that is slow, not the program."""
    slow = FILE.with_suffix(".slow")
    if goes_wrong(kind):
        slow.write_text(str(os.getpid()))
    return kind == FAULT and slow.exists() and slow.read_text() == str(os.getpid())


class Rows(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if goes_wrong("loader"):
            time.sleep(FOR_EVER_S)
        if is_slow("slow loader"):
            time.sleep(STEP_S / 4 * SLOW)
        return torch.ones(16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        time.sleep(STEP_S * (SLOW if is_slow("slow compute") else 1))
        return self.outer(self.inner(x).relu())


def flip(tensor):
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 18)


def a_little_wrong(module, inputs, output):
    return output * (1 + 2**-8)


def go_wrong(model, optimizer):
    inner = model.module.inner.weight
    if goes_wrong("sleep"):
        time.sleep(FOR_EVER_S)
    if goes_wrong("spin in C"):
        sum(range(10**15))
    if goes_wrong("save"):
        pipe = FILE.with_suffix(".pipe")
        os.mkfifo(pipe)
        torch.save(model.state_dict(), pipe)  # nobody reads
    if goes_wrong("parameter"):
        flip(inner)
    if goes_wrong("moment"):
        flip(optimizer.state[inner]["exp_avg"])
    if goes_wrong("layer"):
        model.module.outer.register_forward_hook(a_little_wrong)
    if not goes_wrong("left out"):
        dist.all_reduce(torch.ones(5 if goes_wrong("other shape") else 3))


def main():
    dist.init_process_group("gloo")
    print("group", os.environ["RANK"], os.getpid(), time.time(), flush=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, x in enumerate(DataLoader(Rows(), batch_size=4), 1):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, os.getpid(), time.time(), flush=True)
        go_wrong(model, optimizer)


if __name__ == "__main__":
    main()
