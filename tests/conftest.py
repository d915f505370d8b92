"""Shared by all tests: no hub, one thread, and a processor that is not asked for what it may refuse."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, where Ctrl-C would do nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)

from dualview.models.amx_workaround import mind_amx

mind_amx()

if os.environ.get("DUALVIEW_ODD_ALIGNMENT"):  # one of the settings of `make test-rounding`
    from alignment import misalign_modules

    misalign_modules()
