"""Where the models under test run: `TEST_DEVICE=cuda python -m pytest tests/oracle` moves them."""

from __future__ import annotations

import os
from typing import Final

import torch

DEVICE: Final = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
