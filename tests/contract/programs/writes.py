"""All that a program writes: tables, logs, its own checkpoints by rename, each in a folder, a progress bar."""

import csv
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from common import Rows, finish, net
from torch.utils.data import DataLoader

torch.manual_seed(1)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Rows(32), batch_size=8, shuffle=True)
logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger("train")
logger.addHandler(logging.FileHandler("train.log"))
table = open("steps.csv", "w", newline="")
rows = csv.writer(table)
rows.writerow(["step", "loss"])
lines = open("lines.txt", "a", buffering=1)
folders, started, shown, step = [], time.time(), time.time(), 0
for epoch in range(5):
    with open(f"epoch{epoch}.txt", "w") as whole, open("epochs.txt", "a", buffering=1) as added:
        whole.write(f"epoch {epoch}\n")
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            rows.writerow([step, loss.item()])
            table.flush()
            lines.write(f"{step}\n")
            whole.write(f"{step} {loss.item():.8f}\n")
            added.write(f"{epoch}.{step}\n")
            logger.info("step %d loss %.8f", step, loss.item())
            sys.stderr.write(f"\r{step}/20 [{time.time() - started:.1f}s]")
            if time.time() - shown > 0.02:
                shown = time.time()
                sys.stderr.write(f"{loss.item():.3f}\n")
            if step % 3 == 0:
                folder = pathlib.Path(f"checkpoint-{step}")
                folder.mkdir()
                (folder / "state.json").write_text(json.dumps({"step": step, "loss": loss.item()}))
                torch.save(model.state_dict(), folder / "model.new")
                os.rename(folder / "model.new", folder / "model.pt")
                folders.append(folder)
                if len(folders) > 2:
                    shutil.rmtree(folders.pop(0))
                with open("latest", "w") as latest:
                    latest.write(folder.name)
                with tempfile.TemporaryDirectory() as scratch:
                    scratched = pathlib.Path(scratch) / "a.json"
                    scratched.write_text(json.dumps([step]))
                    assert json.loads(scratched.read_text()) == [step]
                    with open(scratched, "a") as more:
                        more.write(" ")
                    assert scratched.read_text() == f"[{step}] "
    with open("history.jsonl", "a") as history:
        history.write(json.dumps({"epoch": epoch, "loss": loss.item()}) + "\n")
table.close()
finish(model, optimizer, step, [str(f) for f in folders])
