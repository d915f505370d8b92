"""The verbs of the command line as functions, with the verb's name and arguments.

Here are those that use several rooms: `run`, `prompt`, `verify` and `assets`. The others are functions of one room;
`dualview.__init__` lists their modules. Rooms are imported when a verb is called, so that no verb waits for what it
does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from dualview.io.errors import UserError, one_of
from dualview.io.json_files import Place, check_place, is_stdout, plain, save_json
from dualview.io.progress import Progress, Say, Silent, say_nothing
from dualview.options import RunOptions

if TYPE_CHECKING:
    from dualview.analyses.certificate.certificate import Certificate
    from dualview.comparison.estimate import Estimate
    from dualview.comparison.result import Result
    from dualview.comparison.seeds import SeedsResult
    from dualview.duality.verify.run import Check
    from dualview.io.assets import AssetStatus
    from dualview.io.gguf.cache import Conversion
    from dualview.models.language_model import LanguageModel
    from dualview.tasks.prompts import PromptSet
    from dualview.tasks.show_prompt import ShownPrompt

Seeds = str | Sequence[int]


# Each says only what decides the type of the answer; the function itself has every argument.
@overload
def run(*, seeds: None = None, dry_run: Literal[False] = ..., **options: Any) -> Result: ...
@overload
def run(*, seeds: Seeds, dry_run: Literal[False] = ..., **options: Any) -> SeedsResult: ...
@overload
def run(*, seeds: Seeds | None = ..., dry_run: bool, **options: Any) -> Result | SeedsResult | Estimate: ...
def run(
    *,
    model: str | LanguageModel = "embedded",
    seeds: Seeds | None = None,
    out: Path | str | None = None,
    json: Place = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_written: Callable[[Path], object] | None = None,
    **options: Any,
) -> Result | SeedsResult | Estimate:
    """Compare zero-shot, in-context and fine-tuned on one task.

    model       a name, as `--model` takes it, or a model that is already loaded
    seeds       repeat over several draws of demonstrations: "1:5", "1,3,7" or a list; gives a `SeedsResult`
    out         a folder for the result, its report and (`save_records`) the tensors
    json        a file for the result alone, or "-" for standard output
    dry_run     count tokens and estimate the time; gives an `Estimate`
    on_written  is called with every file that was written
    options     the fields of `RunOptions`

    A report or tensors that cannot be written are a warning: the result is kept.
    """
    chosen, lm = _chosen(model, options)
    folder = None if out is None else Path(out)
    for place in (json, None if folder is None else folder / "result.json"):
        check_place(place)
    if chosen.save_records and folder is None:
        raise UserError("The option save_records needs a folder to write to: give out (--out DIR).")
    progress = progress or Silent()
    file = None if json is None or is_stdout(json) else Path(json)
    if dry_run:
        from dualview.comparison.estimate import estimate

        return estimate(chosen, progress, lm)
    if seeds is None:
        from dualview.comparison.run import run as run_comparison
        from dualview.report.write_outputs import write

        found = run_comparison(chosen, lm=lm, progress=progress)
        written = write(found, out=folder, json=file)
    else:
        if options.get("seed") is not None:
            raise UserError("--seed and --seeds are both given; give one of them.")
        found, written = _run_seeds(chosen, seeds, lm, folder, file, progress)
    if on_written is not None:
        for path in written:
            on_written(path)
    if is_stdout(json):
        save_json(json, found.to_json())
    return found


def _run_seeds(
    chosen: RunOptions,
    seeds: Seeds,
    lm: LanguageModel | None,
    out: Path | None,
    json: Path | None,
    progress: Progress,
) -> tuple[SeedsResult, list[Path]]:
    from dualview.comparison.seeds import compare_seeds, parse_seeds
    from dualview.report.write_outputs import rescue_seeds, write_seed, write_seeds

    each: list[Path] = []
    finished: dict[int, Result] = {}

    def keep(seed: int, result: Result) -> None:
        if out is not None:
            each.extend(write_seed(seed, result, out=out))
        else:
            finished[seed] = result

    # A single number is no sequence, and is refused like the text "3".
    numbers = parse_seeds(str(seeds) if isinstance(seeds, str | int) else ",".join(map(str, seeds)))
    try:
        found = compare_seeds(chosen, numbers, lm=lm, progress=progress, on_result=keep)
    except BaseException:  # an interrupt, too, must not cost the seeds that are finished
        rescue_seeds(finished)
        raise
    return found, [*write_seeds(found, out=out, json=json), *each]


def calibrate(
    *,
    model: str | LanguageModel = "embedded",
    task: str = "movie",
    full: bool = False,
    seed: int = 0,
    out: Path | str | None = None,
    json: Place = None,
    progress: Progress | None = None,
    on_written: Callable[[Path], object] | None = None,
    **options: Any,
) -> Certificate:
    """Put known nulls and known positives under the verdict: how often is it right, and how much does it need to see?

    model, task  whose runs the real records come from
    full         more of everything
    seed         of every random draw: another seed is another certificate
    out          a folder for the certificate, its page and its figure
    json         a file for the numbers alone, or "-" for standard output
    options      other fields of `RunOptions` for the real runs
    """
    from dualview.analyses.certificate.calibration import calibrate as certify
    from dualview.report.certificate import write_certificate

    for place in (json, None if out is None else Path(out) / "calibration.json"):
        check_place(place)
    found = certify(model=model, task=task, full=full, seed=seed, progress=progress, **options)
    save_json(json, found.to_json())
    for path in write_certificate(found, Path(out)) if out is not None else ():
        if on_written is not None:
            on_written(path)
    return found


def prompt(
    *,
    query: int = 0,
    model: str | LanguageModel = "embedded",
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> ShownPrompt:
    """One in-context prompt, token by token; `query` counts from 0, the options are the fields of `RunOptions`."""
    from dualview.tasks.show_prompt import ShownPrompt

    check_place(json)
    chosen, lm = _chosen(model, options)
    shown = ShownPrompt(*_prompts(chosen, lm, progress or Silent()), query)
    save_json(json, shown.tokens)
    return shown


def _prompts(options: RunOptions, lm: LanguageModel | None, progress: Progress) -> tuple[PromptSet, Any]:
    """The prompts of a run and the tokenizer they were made with."""
    if options.seed == "auto":  # the model is asked which demonstrations it learns most from
        from dualview.comparison.prepare import prepare

        prepared = prepare(options, lm, progress)
        return prepared.prompts, prepared.lm.tokenizer
    from dualview.comparison.inputs import encode, read_inputs
    from dualview.models.devices import BALANCED, pick_device
    from dualview.models.reader import load_reader

    inputs = read_inputs(options)
    if lm is not None:
        reader = lm.reader
    else:
        if options.device != BALANCED:
            pick_device(options.device)  # not used here, but a mistake in it is better found now than in the run
        with progress.part(f"loading the tokenizer of {options.model}", 1) as advance:
            reader = load_reader(options.model, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
            advance(1)
    assert inputs.demos is not None
    return encode(options, reader, inputs.task, inputs.demos, inputs.queries), reader.tokenizer


def verify(
    model: str | LanguageModel | None = "embedded",
    *,
    seed: int = 0,
    wrong: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    json: Place = None,
) -> list[Check]:
    """Check every identity on random data and on a model.

    model   a name, or a loaded model; None or "none": on random data alone
    wrong   run the common misprints instead, each of which must fail
    """
    from dualview.duality.verify.run import verify as check_identities
    from dualview.duality.verify.run import verify_wrong

    check_place(json)
    lm: LanguageModel | None
    if isinstance(model, str) and model != "none":
        from dualview.models.loading import load_model

        lm = load_model(model, dtype=dtype, device=device)
    else:
        lm = None if isinstance(model, str) else model
    checks = verify_wrong(seed, lm) if wrong else check_identities(seed, lm)
    save_json(json, [check.to_json() for check in checks])
    return checks


@dataclass(frozen=True)
class Assets:
    """The embedded model and data, the models that can be fetched, and the cached conversions of GGUF files."""

    assets: list[AssetStatus]
    conversions: list[Conversion]
    """After `clear`: those that were removed."""

    @property
    def ready(self) -> bool:
        """Whether nothing is damaged, and nothing missing but models that were never fetched."""
        return all(each.state == "ready" or (each.optional and each.state == "missing") for each in self.assets)


def assets(
    action: Literal["list", "fetch", "verify", "clear"] = "list",
    names: Sequence[str] = (),
    *,
    json: Place = None,
    say: Say = say_nothing,
) -> Assets:
    """List, fetch or verify the embedded model and data; list or clear the cached conversions of GGUF files.

    `names` go with `fetch`: which assets, for example "qwen2.5-coder-0.5b".
    """
    from dualview.io import assets as files
    from dualview.io.gguf import cache as gguf_cache

    one_of("action", action, Literal["list", "fetch", "verify", "clear"])
    check_place(json)
    if names and action != "fetch":
        raise UserError(f"Only fetch takes names of assets; `dualview assets {action}` is about all of them.")
    if action == "clear":
        found = Assets([], gguf_cache.clear())
    elif action == "fetch":
        found = Assets(files.fetch_assets(say, names), gguf_cache.conversions())
    else:
        listed = files.verify_assets(say) if action == "verify" else files.list_assets()
        found = Assets(listed, gguf_cache.conversions())
    save_json(json, plain(asdict(found)))
    return found


def _chosen(model: str | LanguageModel, options: dict[str, Any]) -> tuple[RunOptions, LanguageModel | None]:
    """The checked options and the model, if it is loaded, with the weights that they ask for."""
    if isinstance(model, str):
        return RunOptions.make(model=model, **options), None
    from dualview.models.untrained import redrawn

    chosen = RunOptions.make(model=model.name, **options)
    return chosen, redrawn(model, chosen.weights)
