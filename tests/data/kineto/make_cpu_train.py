"""How cpu_train.json.gz was made (PyTorch 2.14): two training steps of a tiny model, a block checkpointed."""

import gzip
import json
import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
block = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU())
head = torch.nn.Linear(4, 2)
modules = torch.nn.ModuleList([stem, block, head])
optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, foreach=True)
images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])

folder = Path(tempfile.mkdtemp())
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=True,
    schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
    on_trace_ready=lambda p: p.export_chrome_trace(str(folder / "trace.json")),
) as profiler:
    for _ in range(3):
        optimizer.zero_grad()
        features = checkpoint(block, stem(images), use_reentrant=False)
        torch.nn.functional.cross_entropy(head(features.mean((2, 3))), labels).backward()
        optimizer.step()
        profiler.step()

trace = json.loads((folder / "trace.json").read_text())
shutil.rmtree(folder)
for personal in ("host_name", "trace_id", "traceName"):
    trace.pop(personal, None)
target = Path(__file__).with_name("cpu_train.json.gz")
with target.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
    packed.write(json.dumps(trace, separators=(",", ":")).encode())
