"""The sign lab: what breaks when the values are signed?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.sign")
