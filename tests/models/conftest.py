"""One thread for models this small, and `tests/` on the path, so that tests share `zoo` and the reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Some virtual machines announce AMX and then refuse it: a bfloat16 product would kill the whole run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def _single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
