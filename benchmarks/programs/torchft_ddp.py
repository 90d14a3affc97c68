"""The tiny program in torchft's own API: one replica group with one worker, gloo, a lighthouse beside.

Prints the same lines as ``lmres/cli/trial_program.py``; a step is one that was committed, and its line ends with the
number of replicas that took part.
"""

import os
import time

print("life", os.environ["REPLICA"], os.getpid(), time.time(), flush=True)

from datetime import timedelta  # noqa: E402

import torch  # noqa: E402
from torchft import Manager, Optimizer, ProcessGroupGloo  # noqa: E402
from torchft.ddp import DistributedDataParallel  # noqa: E402


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=float(os.environ["GROUP_TIMEOUT_S"]))),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{os.environ['REPLICA']}",
        timeout=timedelta(seconds=float(os.environ["GROUP_TIMEOUT_S"])),
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    print("group", os.environ["REPLICA"], os.getpid(), time.time(), flush=True)
    while True:
        optimizer.zero_grad()
        replicated(torch.ones(4, 8)).square().mean().backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            print("step", before + 1, os.getpid(), time.time(), manager.num_participants(), flush=True)
        time.sleep(float(os.environ.get("TRIAL_STEP_S", "0.1")))


if __name__ == "__main__":
    main()
