"""Say what torch sees of GPUs, and what is missing where it sees none."""

from __future__ import annotations

import torch


def is_here(device: torch.device) -> bool:
    """Return whether a device can compute; one that cannot is only planned for."""
    return device.type != "cuda" or torch.cuda.is_available()


def no_cuda() -> str:
    """Say that torch sees no GPU, and what it needs to see one."""
    advice = "it needs a driver, and torch with CUDA: make clean && make install TORCH=torch"
    return f"torch {torch.__version__} sees no CUDA device: {advice}"


def described_gpus() -> str:
    """Describe the GPUs that torch sees, and for which CUDA it was built; "" if it sees none."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [
        f"cuda:{index} {gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
        f"{gpu.total_memory / 2**30:.1f} GiB"
        for index, gpu in enumerate(found)
    ]
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return "; ".join([*gpus, build]) if gpus else ""
