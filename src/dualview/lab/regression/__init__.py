"""The regression lab: does training find gradient descent?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.regression")
