"""A workaround for virtual machines with a broken AMX.

Some virtual machines announce Intel's AMX but do not support it: a half-precision matrix product then ends the process
with an illegal instruction. No query reveals this beforehand, so a child process tries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TRY = "import torch; a = torch.ones(32, 32, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"


def mind_amx() -> None:
    """Turn AMX off in oneDNN where it fails; call it before the process's first half-precision product."""
    about = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not about.exists() or "amx_bf16" not in about.read_text():
        return
    # A negative return code is a signal: the child died of the illegal instruction.
    if subprocess.run([sys.executable, "-c", _TRY], capture_output=True, check=False).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
