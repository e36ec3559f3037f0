"""Write the arrays that all competitors read: data.py OUT CLIENTS SAMPLES FOLDER (Fashion-MNIST if FOLDER has it, else noise)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedstill import data

out, clients, samples, folder = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
rng, count = np.random.default_rng(0), clients * samples
if (folder / "fmnist").is_dir() and count <= 60_000:
    found = data.load("fmnist", str(folder))
    x, y = np.asarray(found.x, np.float32).reshape(-1, 28, 28), np.asarray(found.y, np.int64)
    pick = rng.permutation(len(y))[:count]
    x, y = x[pick] / max(1.0, float(x.max())), y[pick]
else:
    x, y = rng.random((count, 28, 28), np.float32), rng.integers(0, 10, count)
with (part := out.with_suffix(".part")).open("wb") as file:
    np.savez(file, x=x.reshape(clients, samples, 28, 28), y=y.reshape(clients, samples))
part.rename(out)
