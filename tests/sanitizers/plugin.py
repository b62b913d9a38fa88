"""Put the kernels that `KERNELS` names in the place of the installed ones, before a test runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader

NAME = "session_server.runner.native._native"

_loader = ExtensionFileLoader(NAME, os.environ["KERNELS"])
_spec = importlib.util.spec_from_loader(NAME, _loader)
assert _spec is not None
_module = importlib.util.module_from_spec(_spec)
_loader.exec_module(_module)
sys.modules[NAME] = _module
