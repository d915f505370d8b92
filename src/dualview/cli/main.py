"""The command line: one file for each verb, which calls the library's function of that name and prints its result.

Nothing heavy is imported before a verb runs, so that `dualview --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

import typer

from dualview.cli import lab, store
from dualview.cli.assets import assets
from dualview.cli.calibrate import calibrate
from dualview.cli.compile import compile_
from dualview.cli.doctor import doctor
from dualview.cli.exact import exact
from dualview.cli.explain import explain
from dualview.cli.finetune import finetune
from dualview.cli.heads import heads
from dualview.cli.metrics import metrics
from dualview.cli.prompt import prompt
from dualview.cli.report import report
from dualview.cli.run import run
from dualview.cli.serve import serve
from dualview.cli.sweep import Stopped, sweep
from dualview.cli.tasks import tasks
from dualview.cli.verify import verify
from dualview.io import terminal
from dualview.io.errors import UserError

app = typer.Typer(
    name="dualview",
    help="How far does a language model's in-context learning behave like gradient descent? Measured, with controls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_STORE = (store.ls, store.show, store.diff, store.export, store.query)
_RUN = (run, prompt, metrics, verify, explain, heads, finetune, compile_, exact, calibrate)
_KEEP = (tasks, assets, doctor, report, sweep)
for _verb in (*_RUN, *_KEEP, *_STORE):
    app.command(_verb.__name__.rstrip("_"))(_verb)  # in this order in `--help`
lab.add(app)
app.command()(serve)


def main() -> None:
    """Run a verb; a user's mistake is one sentence on standard error and exit code 2."""
    terminal.open_streams()
    # Before torch is imported. By default OpenMP's threads wait for one another by spinning, and where something else
    # has one of their cores they spin for most of the time: a run took 100 s instead of 14. Asleep they cost 2 to 6 %.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Importing torch and transformers makes millions of objects that stay. Searching them for garbage again and again
    # costs most of a second, and searching them once more at the end another.
    gc.set_threshold(100_000, 20, 100)
    atexit.register(_skip_last_collection)
    try:
        with terminal.warnings_as_sentences(), terminal.checked_output():
            app()
    except UserError as error:
        print(f"dualview: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # of what an option names: a name that no file system takes, a file that went away
        if not error.filename:
            raise
        print(f"dualview: {_short(str(error.filename))} cannot be used ({error.strerror}); check it.", file=sys.stderr)
        sys.exit(2)
    except SystemExit as left:
        # Typer turns an interrupt into this exit. A sweep has already reported what it kept.
        if left.code == 130 and not isinstance(left, Stopped):
            print("dualview: interrupted.", file=sys.stderr)
        raise


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:40]}…{name[-40:]}"


def _skip_last_collection() -> None:
    if "duckdb" not in sys.modules:  # it would report what the last collection leaves
        gc.freeze()


if __name__ == "__main__":
    main()
