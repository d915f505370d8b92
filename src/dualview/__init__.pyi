"""The public names, each with the module it comes from: type checkers read this file, and `__init__.py` at run time."""

from dualview import lab as lab
from dualview import plot as plot
from dualview import store as store
from dualview import variants as variants
from dualview.analyses.compile import compile_patch as compile
from dualview.analyses.explain import explain as explain
from dualview.analyses.heads import heads as heads
from dualview.comparison.result import Result as Result
from dualview.comparison.seeds import SeedsResult as SeedsResult
from dualview.comparison.seeds import compare_seeds as compare_seeds
from dualview.io.doctor import doctor as doctor
from dualview.io.errors import UserError as UserError
from dualview.metrics.measured import Measured as Measured
from dualview.metrics.recompute import recompute as metrics
from dualview.metrics.summary import compute_metrics as compute_metrics
from dualview.metrics.verdict import Verdict as Verdict
from dualview.metrics.verdict import judge as judge
from dualview.models.exact import exact as exact
from dualview.models.language_model import LanguageModel as LanguageModel
from dualview.models.loading import load_model as load_model
from dualview.options import RunOptions as RunOptions
from dualview.pieces import ask as ask
from dualview.pieces import build_prompts as build_prompts
from dualview.pieces import finetune as finetune
from dualview.pieces import gather as gather
from dualview.pieces import load_result as load_result
from dualview.records import Records as Records
from dualview.records import Setting as Setting
from dualview.records import load_records as load_records
from dualview.records import save_records as save_records
from dualview.report.build import report as report
from dualview.store.api import diff as diff
from dualview.store.api import export as export
from dualview.store.api import load as load
from dualview.store.api import ls as ls
from dualview.store.api import query as query
from dualview.store.api import show as show
from dualview.store.store import Store as Store
from dualview.sweep.runner import sweep as sweep
from dualview.tasks.task import Task as Task
from dualview.tasks.task import list_tasks as list_tasks
from dualview.tasks.task import load_task as load_task
from dualview.tasks.task import tasks as tasks
from dualview.verbs import assets as assets
from dualview.verbs import calibrate as calibrate
from dualview.verbs import prompt as prompt
from dualview.verbs import run as compare
from dualview.verbs import run as run
from dualview.verbs import verify as verify
from dualview.web.serve import serve as serve

# Type checkers take `x as x` as public by itself; these have another name in their modules.
__all__ = ["compare", "compile", "metrics"]
__version__: str
