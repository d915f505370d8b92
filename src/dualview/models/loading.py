"""Getting a causal language model: embedded, from a folder, from a GGUF file, or from the hub.

Weights are read from safetensors or GGUF only, never from a pickle, and a model's own code is run only when asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dualview import assets
from dualview.errors import UserError
from dualview.gguf import read_gguf
from dualview.hub import HubName
from dualview.models.anatomy import Anatomy, dissect
from dualview.models.cpu import mind_amx
from dualview.models.dispatch import Call, Unsupported, run_forward
from dualview.models.hub import Snapshot, fetch_code, fetch_model
from dualview.models.prefix import Causal
from dualview.models.probe import Whole

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
BALANCED = "balanced"
"""The `device` that spreads a model's layers over all GPUs."""
_WEIGHTS_SHARE = 0.8  # of a GPU's free memory; the rest is for the passes
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class LanguageModel:
    """A causal LM with its tokenizer, and what dualview found out about it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    """A Hugging Face tokenizer; `tasks.prompt.Tokenizer` says what is used of it."""
    anatomy: Anatomy
    slow_because: str | None = None
    """Why this architecture cannot share a prefix between packed queries, found on loading; None where it can."""
    commit: str | None = None
    """The hub's commit that it was read from; None if it did not come from the hub."""
    code_commits: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other repositories of the hub that its Python code was taken from, each with its commit."""
    _hash: list[str] = field(default_factory=list[str], repr=False, compare=False)

    @property
    def whole_because(self) -> str | None:
        """Why prompts are run whole now: the architecture, or an attention variant that the model wears."""
        variant = replaced_attention(self.model)
        return self.slow_because if variant is None else f"its attention is the variant {variant}"

    @property
    def fast(self) -> bool:
        return self.whole_because is None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context(self) -> int | None:
        """How many positions the model has, where its configuration says."""
        config = self.model.config.get_text_config()
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            found = getattr(config, key, None)
            if isinstance(found, int) and found > 0:
                return found
        return None

    def shares_prefix(self, prefix: int, longest: int, shift: int = 0) -> bool:
        """Whether queries of up to `longest` tokens, moved on by `shift`, may share a prefix of so many.

        Not where rotary positions are scaled by the length of what is read and the scaling differs between the prefix
        by itself and a whole prompt: with longrope, if the prompt goes past the length at which it changes and the
        prefix does not; with dynamic scaling, if the prompt goes past it at all.
        """
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            kind = each.get("rope_type")
            turn = each.get("original_max_position_embeddings") or self.context or 0
            if kind in ("longrope", "dynamic") and prefix + shift + longest > turn:
                return self.fast and kind == "longrope" and prefix > turn
        return self.fast

    @property
    def weights_hash(self) -> str:
        """sha256 over every parameter's name, shape, dtype and bytes; computed once."""
        if not self._hash:
            digest = hashlib.sha256()
            for name, tensor in sorted(self.model.state_dict().items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self._hash.append(digest.hexdigest())
        return self._hash[0]


def load_model(
    name: str = "embedded",
    *,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a causal LM by name: `embedded`, a folder, a `.gguf` file or a hub id (`owner/name@revision`)."""
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}.")
    where = None if device == BALANCED else pick_device(device)
    _quiet()
    if where is not None and where.type == "cpu" and dtype in ("bfloat16", "float16"):
        mind_amx()
    source = _source(name)
    hub = Snapshot(Path(name))
    try:
        if isinstance(source, Path):
            if where is None:
                raise UserError(f"--device {BALANCED} takes a folder or a hub id, not a GGUF file: convert it first.")
            read = read_gguf(source, DTYPES[dtype])
            tokenizer, model = read.tokenizer, read.model
        else:
            hub = _snapshot(source, trust_remote_code)
            source = source if isinstance(source, str) else f"{hub.folder}/"
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
            spread = {} if where is not None else {"device_map": "balanced", "max_memory": _room_on_gpus()}
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = _with_variant(name, source, DTYPES[dtype], where)
            if model is None:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source, **options, **spread, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True
                )
                model, info = loaded
                _must_be_on_gpus(name, model)
                _must_be_whole(name, info)
                if hasattr(model.config, "dualview"):
                    raise UserError(f"{name} was saved with an attention variant: download it and give its folder.")
            _must_speak(name, tokenizer)
    except UserError:
        raise
    except Exception as error:
        raise UserError(_why(name, error)) from error
    if where is not None:
        model.to(where)  # pyright: ignore[reportArgumentType]
    if dtype == "float64" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product of a mixture of experts has no float64
    return replace(adopt(model, tokenizer, name), commit=hub.commit, code_commits=hub.code)


def _snapshot(source: str | HubName, trust_remote_code: bool) -> Snapshot:
    """The files of a model, and of the code it takes from elsewhere, on this machine."""
    if isinstance(source, HubName):
        return fetch_model(source, trust_remote_code=trust_remote_code)
    folder = Path(source)
    return Snapshot(folder, code=fetch_code(folder) if trust_remote_code else {})


def _with_variant(name: str, source: str, dtype: torch.dtype, where: torch.device | None) -> PreTrainedModel | None:
    """The model of a folder with the attention variant it was saved with; None where it was saved with none."""
    config = Path(source) / "config.json"
    if not config.is_file() or "dualview" not in json.loads(config.read_text(encoding="utf-8")):
        return None
    if where is None:
        raise UserError(f"{name} was saved with an attention variant, which --device {BALANCED} does not take.")
    from dualview.variants.storage import load

    return load(source, dtype=dtype)


def replaced_attention(model: PreTrainedModel) -> str | None:
    """The variant in place of the model's softmax, if it wears one (`augmented` leaves the softmax alone)."""
    from dualview.variants.registry import VARIANTS, implementation

    worn = {implementation(kind): name for name, kind in VARIANTS.items()}
    variant = worn.get(model.config._attn_implementation or "")  # pyright: ignore[reportPrivateUsage]
    return None if variant == "augmented" else variant


def adopt(model: PreTrainedModel, tokenizer: Any, name: str) -> LanguageModel:
    """Take a model that is already in memory: find its parts and try the fast path on it."""
    model.eval().requires_grad_(False)
    try:
        anatomy = dissect(model)
    except Unsupported as error:
        raise UserError(f"dualview cannot follow the attention of {name}: {error}.") from error
    lm = LanguageModel(name, model, tokenizer, anatomy)
    _must_be_causal(lm)
    return replace(lm, slow_because=_slow_because(lm))


def _must_be_whole(name: str, info: Any) -> None:
    """A weight that the files lack would be drawn at random."""
    for what in ("missing_keys", "mismatched_keys"):
        found = sorted(str(key) for key in info[what])
        if found:
            raise UserError(
                f"The weights of {name} are not whole: {len(found)} {what.replace('_', ' ')}, the first {found[0]}."
            )


def _must_be_on_gpus(name: str, model: PreTrainedModel) -> None:
    """Layers of a spread model that no GPU had room for are left without weights."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if places & {"cpu", "disk"}:
        raise UserError(f"{name} does not fit the free memory of the GPUs; free some, or use a narrower --dtype.")


def _must_speak(name: str, tokenizer: Any) -> None:
    if not tokenizer("a b", add_special_tokens=False)["input_ids"]:
        raise UserError(f"The tokenizer of {name} turns words into no tokens: its files are missing or empty.")


def _room_on_gpus() -> dict[int, int]:
    """What each GPU has free, so that nothing is left to the processor's memory, where a model's layers cannot run."""
    if not torch.cuda.is_available():
        raise UserError(f"--device {BALANCED} spreads a model over GPUs and there is none here; try cpu or auto.")
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0] * _WEIGHTS_SHARE) for gpu in range(torch.cuda.device_count())}


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"Device {device!r} cannot be used here ({_first_line(error)}); try cpu or auto.") from error
    return found


def _source(name: str) -> str | Path | HubName:
    """Where a model is read from: a GGUF file's path, a folder in full, or else a name of the hub."""
    if name == "embedded":
        return str(assets.embedded_model())
    if not name.strip():
        raise UserError("--model is empty; give embedded, a folder, a .gguf file or a hub id.")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no GGUF file {name}.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{name} is not a GGUF file: it does not begin with the GGUF mark.")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {name} holds no model: it has no config.json.")
        return str(path.absolute()) + "/"
    hub = HubName.parse(name)
    if path.exists() or name.startswith((".", "/", "~")) or hub is None:
        raise UserError(f"There is no model folder {name}; --model takes embedded, a folder, a .gguf file or a hub id.")
    return hub


def _why(name: str, error: Exception) -> str:
    if name.endswith(".gguf"):
        return f"The GGUF file {name} could not be read ({_first_line(error)}); it may be cut short: fetch it again."
    if "trust_remote_code=True" in str(error):
        return (
            f"The model {name} needs Python code that comes with it or from another repository, which is not run "
            "unasked; read that code, then add --trust-remote-code (trust_remote_code=True)."
        )
    no_tokenizer = "instantiate the backend tokenizer" in str(error)
    why = "there is no tokenizer beside it: save it to the same folder" if no_tokenizer else _first_line(error)
    return (
        f"The model {name} could not be loaded ({why}); --model takes embedded, a folder with "
        "config.json and safetensors weights, a .gguf file, or the id of a causal LM on a reachable hub."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")


def _must_be_causal(lm: LanguageModel) -> None:
    """An encoder loaded as a language model reads what comes later: changing the last token shows it."""
    ids = torch.arange(6, device=lm.device)[None] % lm.vocab
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % lm.vocab
    at = torch.arange(6, device=lm.device)
    with torch.no_grad():
        first, second = (
            run_forward(lm.model, Whole(at, range(6), 0, None), row, at[None], None, native=True)[0, :-1].float()
            for row in (ids, other)
        )
    noise = 1e-5 if lm.dtype in (torch.float32, torch.float64) else 2e-2
    if float((first - second).abs().max()) > noise * float(first.abs().max()):
        raise UserError(f"{lm.name} is not a causal language model: what it predicts depends on later tokens.")


def _slow_because(lm: LanguageModel) -> str | None:
    """Two short prompts, packed behind a shared prefix and whole: None if the model cannot tell the difference.

    In half precision a small difference drowns, so what mixes tokens outside of attention is looked for as well.
    """
    attentive = {layer.module for layer in lm.anatomy.layers}
    for block in lm.anatomy.blocks:
        inside = list(block.modules())
        if not attentive.intersection(inside) or any(isinstance(module, nn.Conv1d) for module in inside):
            return f"{type(block).__name__} mixes tokens by other means than attention"
        if any("Indexer" in type(module).__name__ for module in inside):
            return f"{type(block).__name__} chooses the tokens it attends to"
    try:
        with _small_window(lm):
            worst = _packed_against_whole(lm)
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"its attention cannot be packed ({_first_line(error)})"
    tolerance = 2e-4 if lm.dtype in (torch.float32, torch.float64) else 0.2
    return None if worst <= tolerance else f"packed and whole prompts differ by {worst:.2g} in log-probability"


def _packed_against_whole(lm: LanguageModel) -> float:
    """The largest difference of the two ways to ask, on random tokens."""
    from dualview.models.passes import Plan, ask
    from dualview.tasks.prompt import Query

    draw = torch.Generator().manual_seed(0)
    tokens = [int(t) for t in torch.randint(lm.vocab, (17,), generator=draw)]
    queries = [Query(tuple(tokens[5:9]), ((tokens[0],), (tokens[1], tokens[2])), 0)]
    queries.append(Query(tuple(tokens[9:17]), ((tokens[3], tokens[4]), (tokens[3],)), 0))
    how = Plan(prefix=tuple(tokens[:5]), special=1, record=False)
    fast = ask(lm, queries, how).settings[0].log_probs
    whole = ask(replace(lm, slow_because="on trial"), queries, how).settings[0].log_probs
    return float(abs(fast - whole).max())


@contextmanager
def _small_window(lm: LanguageModel) -> Generator[None]:
    """Shrink a window that only the configuration tells of, so that a short trial shows whether the model has it."""
    config: Any = lm.model.config.get_text_config()
    at = torch.arange(6, device=lm.device)
    looking = _Looking(at)
    with torch.no_grad():
        run_forward(lm.model, looking, at[None] % lm.vocab, at[None], None)
    if not looking.guessed:
        yield
        return
    window, config.sliding_window = config.sliding_window, 4
    try:
        yield
    finally:
        config.sliding_window = window


class _Looking(Causal):
    """Sees whether any layer's window was guessed."""

    guessed = False

    def attend(self, layer: int, call: Call) -> Float[Tensor, "batch query head d_value"]:
        self.guessed = self.guessed or call.guessed
        return super().attend(layer, call)


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
