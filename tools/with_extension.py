"""Run pytest on another build of the extension: `python -m tools.with_extension _NATIVE.SO PYTEST-ARGUMENT...`.

The extension in use is the installed one, so this one is loaded in its place before anything imports it.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

spec = importlib.util.spec_from_file_location("attar._native", sys.argv[1])
assert spec is not None
assert spec.loader is not None
sys.modules["attar._native"] = extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
torch.set_num_threads(2)
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]]))
