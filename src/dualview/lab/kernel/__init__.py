"""The kernel lab: theorem 3.1 of Ren & Liu on a model's own heads."""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.kernel")
