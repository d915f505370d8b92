"""The bound lab: theorem 3.2 of Ren & Liu against the measured generalisation error."""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.bound")
