"""A process of its own that runs commands of dualview one after another, as a shell would, and reports on each.

The hub's clients read their settings once, when they are imported, so a test needs a process in which HF_ENDPOINT was
set from the start; starting one for each command would take ten times as long. Between two commands everything that
was looked up is forgotten.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    from dualview.cli import main as cli
    from dualview.io import hub

    for line in sys.stdin:
        wanted = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("out", "err")]
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            code = 0
            hub.forget()
            os.environ.update(wanted["env"])
            try:
                if "python" in wanted:
                    exec(wanted["python"], {})
                else:
                    sys.argv = ["dualview", *wanted["command"]]
                    cli.main()
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
            for name in wanted["env"]:
                del os.environ[name]
            sys.stdout.flush()
            sys.stderr.flush()
            out, err = (file.read_text(encoding="utf-8") for file in files)
        answers.write(json.dumps({"code": code, "out": out, "err": err}) + "\n")
        answers.flush()
    os._exit(0)  # nothing is left to do; taking all libraries down in order takes seconds


if __name__ == "__main__":
    main()
