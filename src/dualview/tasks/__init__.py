"""Tasks: where rows come from, how one becomes a prompt, and which rows are demonstrations, selection and queries.

`dualview.tasks()` lists those of the library. A new task: a YAML file in `library/`. A new kind of source: `sources`.
"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.task.tasks")
