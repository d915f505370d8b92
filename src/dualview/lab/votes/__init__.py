"""The votes lab: which training examples does a trained layer attend to?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.votes")
