"""A small character-level language model, trained with plain PyTorch DDP.

An ordinary program: it imports nothing of lmres and knows nothing of failures. The text is the source code of
Python's standard library, which every machine has.

    torchrun --nproc-per-node=2 examples/char_lm.py --steps 200
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 128  # ASCII


def read_text(limit: int) -> Tensor:
    """The first ``limit`` ASCII characters of the standard library's sources, as integers: shape (limit,), int64."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += bytes(byte for byte in path.read_bytes() if byte < VOCABULARY)
        if len(text) >= limit:
            break
    return torch.tensor(list(text[:limit]))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, each with the same piece one character later as what is to be predicted."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return self.text[start : start + self.length], self.text[start + 1 : start + self.length + 1]


class CharModel(nn.Module):
    """Embedding, GRU, and a linear layer to the logits of the next character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embed(characters))
        logits: Tensor = self.head(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--log-every", type=int, default=10, metavar="N", help="print the loss every N steps")
    parser.add_argument("--batch", type=int, default=32, help="windows in a batch of one rank")
    parser.add_argument("--length", type=int, default=64, help="characters in a window")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--characters", type=int, default=400_000, help="characters of text that are read")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same first parameters on all ranks; the sampler gives each its own windows

    windows = Windows(read_text(arguments.characters), arguments.length)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(windows, seed=0)
    loader = DataLoader(windows, batch_size=arguments.batch, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        parser.error("--characters: too few for one batch of every rank")
    model = DistributedDataParallel(CharModel(arguments.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    step = epoch = 0
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for characters, following in loader:
            loss = cross_entropy(model(characters).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and (step % arguments.log_every == 0 or step == arguments.steps):
                print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
            if step == arguments.steps:
                break
        epoch += 1
    dist.barrier()  # a rank that leaves early takes its connections, and rank 0's store, from the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
