"""Read SVHN and SYNTH: digits in colour, 32×32, in MATLAB files.

SVHN (Netzer et al. 2011, http://ufldl.stanford.edu/housenumbers, "format 2"): `X` is uint8 [32, 32, 3, n], `y` is [n, 1]
with 10 for the digit 0. SYNTH (Ganin & Lempitsky, "Unsupervised Domain Adaptation by Backpropagation", 2015), as the
repository domainadaptation/datasets publishes it, has the same layout; some of its public readers turn 10 into 0 as for
SVHN, others take `y` as it is, so both spellings of 0 are read, but not in one file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .dataset import Array, Dataset, dataset
from .files import wrong
from .mat5 import matrices


def mat_set(name: str, train: Path, test: Path) -> Dataset:
    """Read SVHN or SYNTH from its two files."""
    x, y = digits_of(train)
    return dataset(name, str(train.parent), x, y, digits_of(test), classes=10)


def digits_of(path: Path) -> tuple[Array, Array]:
    """Read the images (NCHW) and digits of one file."""
    variables = matrices(path, ("X", "y"))
    x, y = variables["X"], variables["y"]
    if x.ndim == 3:  # MATLAB drops a last dimension of 1
        x = x[..., None]
    if x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or x.shape[3] == 0:
        raise wrong(path, f"with X of uint8 [32, 32, 3, n] (it is {x.dtype} {list(x.shape)})")
    if y.size != x.shape[3] or max(y.shape) != y.size:
        raise wrong(path, f"with y of [{x.shape[3]}, 1], one label for each image (it is {list(y.shape)})")
    raw = x.transpose(3, 2, 1, 0)  # the order in memory: image, channel, column, row
    for start in range(0, len(raw), 4096):  # transposed in place, since SYNTH alone fills 1.5 GB
        chunk = raw[start : start + 4096]
        chunk[:] = chunk.swapaxes(2, 3).copy()
    labels = y.reshape(-1)
    if (labels == 10).any() and (labels == 0).any():
        raise wrong(path, "with one label for the digit 0, 10 or 0 (it has both)")
    return raw, np.where(labels == 10, 0, labels)
