"""Values of the host on a device, without waiting for what the device is at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def put(
    values: Sequence[float] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """The values as a tensor on the device.

    A copy from ordinary memory makes the host wait until the device has done everything it was given before; from pinned memory
    it does not, and the host goes on.
    """
    found = values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
