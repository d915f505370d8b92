"""The rivals lab: is it gradient descent, or something better?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.rivals")
