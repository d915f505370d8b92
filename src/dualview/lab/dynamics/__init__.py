"""The dynamics lab: when in training does in-context learning resemble fine-tuning?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.dynamics")
