"""The task-vectors lab: how much of each update lies in the subspace of the task's vectors?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.task_vectors")
