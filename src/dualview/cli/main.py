"""The command line: a file for each verb, which calls the library's function of that name and prints what it returns.

Nothing heavy is imported before a verb runs, so that `dualview --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import sys

import typer

from dualview.cli import (
    assets,
    compile,
    explain,
    heads,
    lab,
    metrics,
    prompt,
    report,
    run,
    serve,
    store,
    sweep,
    tasks,
    verify,
)
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
for _verb in (run, prompt, metrics, verify, explain, heads, compile, tasks, assets, report, sweep, store, lab, serve):
    _verb.add(app)  # in this order in `--help`


def main() -> None:
    """Run a verb; a user's mistake is one sentence on standard error and exit code 2."""
    terminal.open_streams()
    # Importing torch and transformers makes millions of objects that stay. Searching them for garbage again and again
    # costs most of a second, and searching them once more at the end another.
    gc.set_threshold(100_000, 20, 100)
    atexit.register(_skip_last_collection)
    try:
        with terminal.failed_extras_said():
            app()
    except UserError as error:
        print(f"dualview: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as left:
        # Typer turns an interrupt into this exit. A sweep has already reported what it kept.
        if left.code == 130 and not isinstance(left, sweep.Stopped):
            print("dualview: interrupted.", file=sys.stderr)
        raise


def _skip_last_collection() -> None:
    if "duckdb" not in sys.modules:  # it would report what the last collection leaves
        gc.freeze()


if __name__ == "__main__":
    main()
