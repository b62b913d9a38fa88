"""Copy small tensors of the host to a device, in the order of the work that is queued there."""

from __future__ import annotations

from collections.abc import Sequence

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


def upload_values(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return values of the host on `device`, [n], as `upload` does.

    An index that is a list, or a tensor that is made on a GPU from a list, would wait for it.
    """
    return upload(torch.tensor(values, dtype=dtype), device)
