"""Training and validation loaders, metrics as Python and NumPy values, the best weights in memory and in a file,
early stopping, learning rate by plateau."""

import copy
import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from common import CLASSES, Rows, finish, net, pace
from torch.utils.data import DataLoader


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


@torch.no_grad()
def evaluate(model, loader):
    was = model.training
    model.eval()
    losses, outputs, table = [], [], np.zeros((CLASSES, CLASSES), dtype=np.int64)
    for x, y in loader:
        output = model(x)
        losses.append(F.cross_entropy(output, y, reduction="sum").item())
        outputs.append(output.softmax(1).numpy())
        for truth, guess in zip(y.tolist(), output.argmax(1).tolist()):
            table[truth, guess] += 1
    model.train(was)
    return sum(losses) / len(loader.dataset), float(np.trace(table)) / table.sum(), np.concatenate(outputs)


def main():
    torch.manual_seed(3)
    train = DataLoader(Rows(48), batch_size=8, shuffle=True)
    valid = DataLoader(Rows(24), batch_size=8)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    best, best_weights, history, total, step = float("inf"), None, [], 0.0, 0
    for epoch in range(6):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            total += loss.item()
            pace(step)
            if step % 4 == 0:
                value, right, _ = evaluate(model, valid)
                history.append({"step": step, "loss": value, "accuracy": right, "lr": optimizer.param_groups[0]["lr"]})
                print(f"validation {value:.8f} {right:.4f} best {best:.8f}")
                schedule.step(value)
                if value < best:
                    best = value
                    best_weights = copy.deepcopy(model.state_dict())
                    torch.save(best_weights, "best.new")
                    os.replace("best.new", "best.pt")
        with open("metrics.json", "w") as file:
            json.dump({"epoch": epoch, "history": history, "mean": total / step}, file)
    saved = torch.load("best.pt")
    same = all(torch.equal(saved[name], value) for name, value in best_weights.items())
    finish(model, optimizer, step, best, same, total, float(sum(v.sum() for v in best_weights.values())))


if __name__ == "__main__":
    main()
