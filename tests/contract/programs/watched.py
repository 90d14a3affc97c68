"""Does what its standard input says, one command a line, and answers each with one JSON line.

The functions are what a training program does; the test looks at them from outside, while they run.
"""

import json
import os
import re
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
kept = {}


def join():
    if SIZE > 1:
        dist.init_process_group("gloo", rank=RANK, world_size=SIZE)


def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))


def ddp(steps=3, pause=0.0):
    if "ddp" not in kept:
        plain = model()
        wrapped = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.001) if SIZE > 1 else plain
        kept["ddp"] = (wrapped, torch.optim.Adam(plain.parameters()))
    net, optimizer = kept["ddp"]
    for step in range(int(steps)):
        loss = net(torch.full((4, 8), float(step + RANK))).square().sum()
        time.sleep(float(pause) if RANK == 1 else 0.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [round(p.sum().item(), 6) for p in net.parameters()], digest(net.parameters())


def fsdp(steps=2):
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net[0])
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(int(steps)):
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def sync(seconds=0.0):
    time.sleep(float(seconds) if RANK == 1 else 0.0)
    dist.all_reduce(torch.ones(3, 5))


def many():
    pair = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(pair, torch.ones(2))
    dist.broadcast(torch.ones(7, dtype=torch.float64), 0)
    dist.reduce(torch.ones(2, 2), 1)
    dist.gather(torch.ones(6), [torch.ones(6) for _ in range(SIZE)] if RANK == 0 else None, 0)
    dist.all_to_all_single(torch.ones(2), torch.ones(2))
    dist.monitored_barrier()
    dist.barrier()
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def send():
    if RANK == 0:
        dist.send(torch.ones(9), 1)
    else:
        dist.recv(torch.ones(9), 0)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(2), 1 - RANK), dist.P2POp(dist.irecv, torch.ones(2), 1 - RANK)]
    )
    for work in works:
        work.wait()


def groups():
    kept["pair"] = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    dist.all_reduce(torch.ones(1), group=alone)
    dist.all_reduce(torch.ones(1), group=kept["pair"])
    return kept["pair"].group_name


def spin():
    """In C, with the interpreter's lock."""
    re.match("(a+)+b", "a" * 27)


def load(gate):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            wait_for(gate)
            return torch.zeros(1)

    for _ in torch.utils.data.DataLoader(Slow(), batch_size=2):
        pass


def save(gate):
    class Slow:
        def write(self, data):
            wait_for(gate)
            return len(data)

        def flush(self):
            pass

    torch.save({"a": torch.zeros(1)}, Slow())


def save_elsewhere(gate):
    import torch.distributed.checkpoint as dcp

    class Slow(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            wait_for(gate)
            return super().write_data(plan, planner)

    dcp.save({"a": torch.zeros(1)}, storage_writer=Slow(gate + ".dcp"), no_dist=True)


def safetensors(path):
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.zeros(1)}, path)
    return list(load_file(path))


def forward(gate):
    class Slow(nn.Module):
        def forward(self, x):
            wait_for(gate)
            return x

    nn.Sequential(Slow())(torch.zeros(1))


def backward(gate):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            wait_for(gate)
            return gradient

    Slow.apply(torch.zeros(1, requires_grad=True)).backward()


def step(gate):
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            wait_for(gate)
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    Slow([weight], lr=0.1).step()


def user(gate):
    wait_for(gate)


def fork(signal):
    """A child does what would be noted, and answers the signal as if it had never been watched."""
    pid = os.fork()
    if pid == 0:
        for _ in range(50):
            model()(torch.ones(1, 8)).sum().backward()
        list(torch.utils.data.DataLoader(torch.zeros(4, 1)))
        import lmres

        assert lmres.session() is None
        os.kill(os.getpid(), int(signal))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def workers():
    """Loader workers are forks of this process."""
    return len(list(torch.utils.data.DataLoader(torch.zeros(4, 1), num_workers=2)))


def mark():
    import lmres

    lmres.session().mark_progress()


def close_all(upto):
    os.closerange(3, int(upto))


def open_files(path):
    """Until all low numbers are used again."""
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        while os.dup(first) < 1022:
            pass
    except OSError:
        pass


def compiled():
    import torch._dynamo as dynamo

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    whole = torch.compile(net, backend="aot_eager", fullgraph=True)
    inside = torch.compile(lambda x: net(x) * 2, backend="aot_eager", fullgraph=True)
    update = torch.compile(optimizer.step, backend="aot_eager")
    torch.manual_seed(3)
    for _ in range(3):
        (whole(torch.ones(4, 8)).sum() + inside(torch.ones(4, 8)).sum()).backward()
        update()
        optimizer.zero_grad()
    frames = dict(dynamo.utils.counters["frames"])
    breaks = dict(dynamo.utils.counters["graph_break"])
    return digest(net.parameters()), frames, breaks


def compiled_collective():
    def reduced(x):
        dist.all_reduce(x)
        return x + 1

    return torch.compile(reduced, backend="aot_eager", fullgraph=True)(torch.ones(11)).tolist()


def handler():
    """A handler of the program's raises wherever it comes."""
    import signal

    class Mine(RuntimeError):
        pass

    def raising(*_):
        raise Mine

    signal.signal(signal.SIGALRM, raising)
    net = nn.Linear(1, 1)
    caught = 0
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            while True:
                net(torch.ones(1)).sum().backward()
        except Mine:
            caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return caught


def sabotage():
    from lmres.adapters.bootstrap import session

    session.current().watch._page = bytearray(8)
    return ddp()[1]


def digest(tensors):
    import hashlib

    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)


join()
for line in sys.stdin:
    name, *arguments = line.split()
    if name == "end":
        break
    try:
        said = {"said": globals()[name](*arguments)}
    except Exception as error:
        said = {"error": repr(error)}
    print(json.dumps(said), flush=True)
