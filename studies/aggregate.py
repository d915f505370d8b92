"""The numbers of a study: its tables, and what they say over seeds and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from dualview.io.errors import UserError
from dualview.metrics.statistics import draw_interval, draw_p

RESULTS = Path(__file__).parent / "results"
SIX = {"sst2": "SST2", "sst5": "SST5", "mr": "MR", "subj": "Subj", "agnews": "AGNews", "cb": "CB"}
EMBEDDED = {"movie": "movie", "movie5": "movie5", "product": "product", "tweet": "tweet", "source": "source"}
TASKS = {**SIX, **EMBEDDED}
FILMS = ("sst2", "sst5", "mr", "movie", "movie5")
"""Tasks of one kind: sentences about films."""
RULES = {"sgd": "gradient descent", "layer-causal": "layer-causal"}
FIXED = {
    "model": "embedded",
    "dtype": "float32",
    "protocol": "modern",
    "epochs": 1,
    "ft_loss": "all",
    "ft_params": "kv",
    "at": "prompt",
    "calibrate": False,
    "n_queries": 500,
}
"""What all cells of the study have in common."""


def of_the_study(cells: pd.DataFrame) -> pd.Series:
    """Which of some cells could be the study's."""
    return cells["task"].isin(TASKS) & (cells[list(FIXED)] == pd.Series(FIXED)).all(axis=1)


def result_file(path: Path) -> pd.DataFrame:
    """One of the result files, as it is."""
    try:
        return pd.read_parquet(path)
    except (OSError, pa.ArrowException) as error:
        why = "it is not there" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({why}); studies/README.md says how it is made.") from error


@cache
def table(name: str) -> pd.DataFrame:
    """One of the result files, with whole numbers as seeds."""
    frame = result_file(RESULTS / f"{name}.parquet")
    return frame.assign(seed=frame["seed"].astype(int)) if name == "cells" else frame


def comparison(rule: str = "sgd") -> pd.DataFrame:
    """The cells with full controls on the trained model."""
    cells = table("cells")
    chosen = (cells["controls"] == "full") & (cells["lr_asked"] == "auto") & (cells["weights"] == "trained")
    return cells[chosen & (cells["ft_rule"] == rule)]


def both_learn(cells: pd.DataFrame) -> pd.Series:
    """Whether in-context and fine-tuned accuracy are each above zero-shot's, by the 95 % interval over queries."""
    return (cells["accuracy_icl_gain_ci_low"] > 0) & (cells["accuracy_ft_gain_ci_low"] > 0)


def redrawn(weights: str) -> pd.DataFrame:
    """The cells on a model whose weights, or all but its embeddings and norms, were drawn at random."""
    cells = table("cells")
    return cells[(cells["weights"] == weights) & (cells["ft_rule"] == "sgd")]


def rates(rule: str) -> pd.DataFrame:
    """The cells at given learning rates."""
    cells = table("cells")
    return cells[(cells["lr_asked"] != "auto") & (cells["ft_rule"] == rule) & (cells["weights"] == "trained")]


def control(cells: pd.DataFrame, metric: str, name: str) -> pd.Series:
    """A control's value in each of the cells, in their order."""
    rows = table("controls")
    rows = rows[(rows["metric"] == metric) & (rows["name"] == name)].set_index("key")["value"]
    return cells["key"].map(rows)


def passing(cells: pd.DataFrame, name: str | None = None, metric: str = "sim_aou") -> int:
    """In how many of the cells a similarity exceeds one floor, or every one but a shift of position, at p < .01."""
    floors = table("controls").query("metric == @metric and kind == 'floor' and name != 'zsl_shifted'")
    worst = floors[(floors["name"] == name) | (name is None)].groupby("key")["p"].max()
    return int((cells["key"].map(worst) < 0.01).sum())


def one_answer(cells: pd.DataFrame, setting: str) -> int:
    """In how many of the cells a setting gives all queries the same answer (their warnings say so)."""
    return sum(any(line.startswith(f"{setting} predicts label ") for line in lines) for lines in cells["warnings"])


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % interval (Student), or over tasks of such means."""

    value: float
    half: float | None
    n: int
    p: float = float("nan")
    """Of the two-sided test that the mean is 0 (Student)."""

    def show(self, digits: int = 3) -> str:
        if self.n == 0:
            return "–"
        return f"{self.value:.{digits}f}" + (f" ± {self.half:.{digits}f}" if self.half else "")

    @property
    def above_zero(self) -> bool:
        return self.half is not None and self.value > self.half

    @property
    def below_zero(self) -> bool:
        return self.half is not None and -self.value > self.half


def over(values: pd.Series | np.ndarray | list[float]) -> Mean:
    """The mean of some draws.

    >>> over([1.0, 2.0, 3.0]).show(2)
    '2.00 ± 2.48'
    """
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if len(known) < 3:  # two draws give an interval that says nothing
        return Mean(float(known.mean()) if len(known) else float("nan"), None, len(known))
    interval = draw_interval(known.tolist())
    assert interval is not None
    return Mean(float(known.mean()), (interval.high - interval.low) / 2, len(known), draw_p(known) or float("nan"))


Means = Mapping[str, Mean]
"""By task, over its seeds."""


def by_task(cells: pd.DataFrame, values: pd.Series) -> dict[str, Mean]:
    """Over the seeds of each task that was run."""
    return {task: over(values[cells["task"] == task]) for task in TASKS if (cells["task"] == task).any()}


def over_tasks(cells: pd.DataFrame, values: pd.Series) -> Mean:
    """The mean over tasks of means over seeds, its interval over tasks: seeds of one task share its queries."""
    return mean_of(by_task(cells, values))


def mean_of(means: Means, tasks: Iterable[str] = TASKS) -> Mean:
    """Over some of the tasks."""
    return over([means[task].value for task in tasks if task in means])


def mean_of_kinds(means: Means) -> Mean:
    """Over tasks, those about films as one."""
    others = [mean.value for task, mean in means.items() if task not in FILMS]
    return over([mean_of(means, FILMS).value, *others])


def at_norm(curve: pd.DataFrame, norm: float, column: str) -> float:
    """A curve of similarity against step size at one size, interpolated in log size; NaN outside of it."""
    points = curve[curve["status"] != "diverged"].sort_values("update_norm")
    sizes = np.log(points["update_norm"].to_numpy())
    if len(sizes) < 2 or not sizes[0] <= np.log(norm) <= sizes[-1]:
        return float("nan")
    return float(np.interp(np.log(norm), sizes, points[column].to_numpy()))
