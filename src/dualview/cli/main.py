"""The command line: each verb is one function of the library with the same argument names.

Nothing heavy is imported before a verb runs, so that `dualview --help` answers at once.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from dualview.cli import lab as lab_commands
from dualview.cli import report as report_commands
from dualview.cli import serve as web_commands
from dualview.cli import store as runs_commands
from dualview.cli.metavars import DTYPES, metavar_of
from dualview.io import terminal
from dualview.io.atomic import must_be_writable, write_json
from dualview.io.errors import UserError
from dualview.io.saving import cause_of, rescued, save_somewhere
from dualview.options import COMPARISON_ONLY, QUERIES_ONLY, RunOptions

if TYPE_CHECKING:
    from dualview.comparison.result import Result

app = typer.Typer(
    name="dualview",
    help="How far does a language model's in-context learning behave like gradient descent? Measured, with controls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run a verb; a user's mistake is one sentence on standard error and exit code 2."""
    terminal.open_streams()
    # Importing torch and transformers makes millions of objects that stay: looking through them for garbage again and
    # again costs most of a second.
    gc.set_threshold(100_000, 20, 100)
    try:
        with terminal.failed_extras_said():
            app()
    except UserError as error:
        print(f"dualview: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as left:
        # How typer passes an interrupt on. A sweep has said itself what it kept; a lab's checkpoints stay, too.
        if left.code == 130 and not isinstance(left, runs_commands.Stopped):
            print("dualview: interrupted.", file=sys.stderr)
        raise


def _option(field: Field[Any]) -> inspect.Parameter:
    """One of `RunOptions`' fields as a command-line option; None where it is not given."""
    kind = get_type_hints(RunOptions)[field.name]
    default = "" if field.default is None or kind is bool else f" [default: {_shown(field.default)}]"
    # Every value is taken as text, so that `RunOptions` says what is wrong with it, in one sentence.
    shown = None if kind is bool else metavar_of(kind)
    option = typer.Option(f"--{field.name.replace('_', '-')}", help=field.metadata["help"] + default, metavar=shown)
    taken = bool if kind is bool else str
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, option]
    )


def _shown(default: Any) -> str:
    return ",".join(f"{x:g}" for x in default) if isinstance(default, tuple) else str(default)


def _with_run_options(verb: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Give a verb every option of a run but some, in place of its `**options`."""
    own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*(_option(field) for field in fields(RunOptions) if field.name not in without), *own]
    verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    verb.__annotations__ = {p.name: p.annotation for p in parameters}
    return verb


def _with_options_of_one_query(verb: Callable[..., None]) -> Callable[..., None]:
    return _with_run_options(verb, (*QUERIES_ONLY, *COMPARISON_ONLY))


def _with_options_of_a_patch(verb: Callable[..., None]) -> Callable[..., None]:
    return _with_run_options(verb, COMPARISON_ONLY)


@app.command()
@_with_run_options
def run(
    *,
    out: Annotated[
        Path | None, typer.Option(help="write result.json, report.html and the saved records to this folder")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="repeat over several draws: 1:5, or 1,3,7", metavar="<int>:<int>|<int>,…")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="count tokens and estimate the time, no more")] = False,
    **options: Any,
) -> None:
    """Compare zero-shot, in-context and fine-tuned on one task."""
    from dualview.io.progress import for_stream

    chosen = RunOptions.make(**options)
    for place in (json, None if out is None else out / "result.json"):
        _writable(place)
    if chosen.save_records and out is None:
        raise UserError("--save-records needs a folder to write to: give --out DIR.")
    from dualview.comparison import estimate
    from dualview.comparison.run import run as compared
    from dualview.comparison.seeds import compare_seeds, parse_seeds
    from dualview.report.terminal import result_table, seeds_table
    from dualview.report.write_outputs import write, write_seed, write_seeds

    if dry_run:
        _show(estimate.estimate(chosen, for_stream()).table())
        return
    if seeds is not None:
        if options.get("seed") is not None:
            raise UserError("--seed and --seeds are both given; give one of them.")
        each: list[Path] = []

        def keep(seed: int, found: Result) -> None:
            if out is not None:
                each.extend(write_seed(seed, found, out=out))

        several = compare_seeds(chosen, parse_seeds(seeds), progress=for_stream(), on_result=keep)
        written = write_seeds(several, out=out, json=json)
        _present(lambda: seeds_table(several), [*written, *each], "seeds.json", several.save)
        return
    result = compared(chosen, progress=for_stream())
    written = write(result, out=out, json=json)
    _present(lambda: result_table(result), written, "result.json", result.save)


@app.command()
@_with_run_options
def prompt(
    *,
    query: Annotated[
        int,
        typer.Option(
            min=0, help="which query to show, counted from 0 [default: 0]", metavar="<int>", show_default=False
        ),
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="write the tokens and spans to this file")] = None,
    **options: Any,
) -> None:
    """Show one prompt as the model sees it, token by token.

    Each token comes with its span; the candidates follow. Queries, demonstrations and candidates count from 0.
    """
    from dualview.comparison.prepare import prepare
    from dualview.io.progress import for_stream
    from dualview.tasks.show_prompt import describe_prompt, render_prompt

    _writable(json)
    prepared = prepare(RunOptions.make(**options), progress=for_stream())
    tokens = describe_prompt(prepared.prompts, prepared.lm.tokenizer, query)
    _keep(json, tokens)
    if sys.stdout.isatty():
        _show(render_prompt(prepared.prompts, prepared.lm.tokenizer, query))
    else:  # colours say nothing in a file: a line a token
        for token in tokens:
            number = "" if token["number"] is None else token["number"]
            print(token["index"], token["id"], token["span"], number, repr(token["text"]), sep="\t")


@app.command()
def metrics(
    records: Annotated[Path, typer.Argument(help="a records.safetensors file that `run --save-records` wrote")],
    json: Annotated[Path | None, typer.Option(help="write the metrics to this file")] = None,
) -> None:
    """Recompute every metric from saved records, without a model."""
    from dualview.metrics.recompute import recompute
    from dualview.report.terminal import metrics_report

    _writable(json)
    measured = recompute(records).to_json()
    _keep(json, measured)
    _show(metrics_report(measured))


@app.command()
def verify(
    model: Annotated[str, typer.Option(help="also on this model's own tensors; none: on paper alone")] = "embedded",
    seed: Annotated[int, typer.Option(help="draws the data")] = 0,
    wrong: Annotated[bool, typer.Option("--wrong", help="run the common misprints instead: each must fail")] = False,
    dtype: Annotated[str, typer.Option(help="of the model", metavar=DTYPES)] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto takes a GPU if there is one")] = "auto",
    json: Annotated[Path | None, typer.Option(help="write the table to this file")] = None,
) -> None:
    """Check every identity on random data and on a model.

    The exit code is 1 if one fails.
    """
    from dualview.duality.verify.run import render, verify_wrong
    from dualview.duality.verify.run import verify as checks_of

    _writable(json)
    lm = None
    if model != "none":
        from dualview.models.loading import load_model

        lm = load_model(model, dtype=dtype, device=device)

    checks = (verify_wrong if wrong else checks_of)(seed, lm)
    _keep(json, [check.to_json() for check in checks])
    # A misprint stands beside the paper whose statement it spoils, which need not be the one that printed it.
    _show(render(checks, "misprints: every one must fail", "statement of") if wrong else render(checks))
    astray = [check for check in checks if check.status == ("passed" if wrong else "failed")]
    if astray:
        print(f"{len(astray)} of {len(checks)} {'misprints passed' if wrong else 'identities failed'}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
@_with_options_of_one_query
def explain(
    *,
    query: Annotated[str, typer.Option(help="the query's text; a JSON object where the template has several fields")],
    json: Annotated[Path | None, typer.Option(help="write the contributions to this file")] = None,
    **options: Any,
) -> None:
    """Show which demonstrations and tokens an answer came from.

    In context by attention, in fine-tuning by its dual form. Demonstrations are counted from 0.
    """
    from dualview.analyses.explain import explain as explained
    from dualview.io.progress import for_stream

    _writable(json)
    found = explained(query=query, progress=for_stream(), **_given(options))
    _keep(json, found.to_json())
    _show(found.table())


@app.command()
@_with_options_of_one_query
def heads(
    *,
    query: Annotated[str, typer.Option(help="the query's text; a JSON object where the template has several fields")],
    rank: Annotated[int, typer.Option(help="leading singular directions whose spaces are compared")] = 8,
    shuffles: Annotated[int, typer.Option(help="random orders of the tokens behind every floor")] = 5,
    json: Annotated[Path | None, typer.Option(help="write every layer's numbers to this file")] = None,
    **options: Any,
) -> None:
    """Compare demonstrations and fine-tuning as updates of heads.

    Layer by layer, each similarity next to its floor.
    """
    from dualview.analyses.heads import heads as compared
    from dualview.io.progress import for_stream

    _writable(json)
    found = compared(query=query, rank=rank, shuffles=shuffles, progress=for_stream(), **_given(options))
    _keep(json, found.to_json())
    _show(found.table())


@app.command(name="compile")
@_with_options_of_a_patch
def compile_(
    *,
    out: Annotated[Path, typer.Option(help="where to write the patch (safetensors)")],
    json: Annotated[Path | None, typer.Option(help="write how it did to this file")] = None,
    **options: Any,
) -> None:
    """Turn demonstrations into a patch of the weights.

    It is scored on queries that it has not seen.
    """
    from dualview.analyses.compile import compile_patch
    from dualview.io.progress import for_stream

    for place in (out, json):
        _writable(place)
    if json is not None and json.resolve() == out.resolve():
        raise UserError(f"--out and --json both name {out}; give each a file of its own.")
    found = compile_patch(out=out, progress=for_stream(), **_given(options))
    _keep(json, found.to_json())
    _show(found.table())


@app.command()
def tasks(
    names: Annotated[list[str] | None, typer.Argument(help="tasks or YAML files to check; none: list all")] = None,
    data: Annotated[Path | None, typer.Option(help="check them against this folder of <task>/*.jsonl")] = None,
) -> None:
    """List the tasks, or check some: read every row and count labels."""
    from dualview.report.terminal import task_check_table, task_table
    from dualview.tasks.task import check_task, list_tasks, load_task

    if names:
        _show(task_check_table([check_task(load_task(name, data)) for name in names]))
    else:
        _show(task_table(list_tasks()))


@app.command()
def assets(
    action: Annotated[Literal["list", "fetch", "verify", "clear"], typer.Argument(help="what to do")] = "list",
) -> None:
    """List, fetch or verify the embedded model and data; list or clear the cached conversions of GGUF files."""
    from dualview.io import assets as library
    from dualview.io import gguf_cache
    from dualview.report.terminal import asset_table, conversion_table

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    if action == "clear":
        removed = gguf_cache.clear()
        print(f"removed {len(removed)} cached conversions of GGUF files ({sum(e.size for e in removed) / 1e6:.0f} MB)")
        return
    if action == "fetch":
        found = library.fetch_assets(say)
    else:
        found = library.verify_assets(say) if action == "verify" else library.list_assets()
    _show(asset_table(found))
    conversions = gguf_cache.conversions()
    if conversions:
        _show(conversion_table(conversions))
    if action == "verify" and any(status.state != "ready" for status in found):
        raise UserError("Some assets are missing or damaged; run `dualview assets fetch`.")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _present(table: Callable[[], Any], written: Sequence[Path], name: str, save: Callable[[Path], None]) -> None:
    """Print a result's table and the files it is in; where that fails, the result is kept all the same."""
    try:
        _show(table())
        for path in written:
            print(f"wrote {path}")
        sys.stdout.flush()
    except Exception as error:
        terminal.forget_output()
        kept = f"the result is in {written[0]}" if written else rescued(name, save)
        terminal.say(f"dualview: warning: The table could not be printed ({cause_of(error)}); {kept}.")


def _show(content: Any) -> None:
    terminal.show(content)


def _keep(path: Path | None, content: Any) -> None:
    """Write a verb's JSON file, before its table is printed; in a temporary folder where that fails."""
    if path is not None:
        save_somewhere([path], lambda place: write_json(place, content))


def _writable(path: Path | None) -> None:
    if path is not None:
        must_be_writable(path)


for _verbs in (report_commands, runs_commands, lab_commands, web_commands):
    _verbs.add(app)


if __name__ == "__main__":
    main()
