"""The language lab: does momentum attention help a language model?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.language")
