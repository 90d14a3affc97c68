"""What replay costs: the share of a training step, at its interval.

python -m benchmarks.replay [--interval 10] [--model mlp|transformer|convolutions] [--batch 32] [--steps 200]

One process trains a model; every ``interval`` steps one part is computed anew, as in a worker. The step without replay
is the median of the steps in between, in the same run. Nothing of lmres but the player runs here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn

from lmres.adapters.replay.player import Player
from lmres.adapters.resume.rng import kept_rng


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (1024,)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(256, 10)), (64, 256)


def convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (3, 32, 32)


MODELS = {"mlp": mlp, "transformer": transformer, "convolutions": convolutions}


def measure(name: str, *, interval: int, batch: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    counts: list[tuple[int, int, str]] = []
    said: list[dict[str, Any]] = []
    player = Player(
        torch,
        interval,
        tell=lambda **fields: said.append(fields),
        covered=lambda *told: counts.append(told),
    )
    plain, replays = [], []
    for step in range(steps):
        x = torch.randn(batch, *shape)
        began = time.perf_counter()
        player.end_looking()
        player.at_boundary(step, [model], ((x,), {}), kept_rng(torch))
        middle = time.perf_counter()
        output = model(x)
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > 2 * interval:
            plain.append(time.perf_counter() - middle)
            replays.append(middle - began)
    covered, modules, reason = counts[-1]
    step_s, added_s = statistics.median(plain), sum(replays) / len(replays)
    parts = sorted({s["part"] for s in said})
    return {
        "model": name,
        "batch": batch,
        "interval_steps": interval,
        "modules": f"{covered} of {modules}",
        "not_covered": reason,
        "parts_seen": len(parts),
        "step_ms": round(step_s * 1000, 2),
        "largest_replay_ms": round(max(replays) * 1000, 2),
        "added_per_step_ms": round(added_s * 1000, 3),
        "share_of_step": round(added_s / step_s, 4),
        "steps_to_certify": interval * covered,
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--interval", type=int, default=10)
    options.add_argument("--model", choices=[*MODELS, "all"], default="all")
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--steps", type=int, default=300)
    args = options.parse_args()
    for name in MODELS if args.model == "all" else [args.model]:
        print(json.dumps(measure(name, interval=args.interval, batch=args.batch, steps=args.steps)))


if __name__ == "__main__":
    main()
