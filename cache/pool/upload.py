"""Copy small tensors of the host to a device, in the order of the work that is queued there."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return `host` on `device`; on a CPU it is the same tensor.

    A copy from pageable memory waits for everything queued on the device, so it goes through pinned
    memory, which torch's allocator hands out again only after the device has read it.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
