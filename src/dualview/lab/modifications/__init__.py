"""The modifications lab: do the attentions that the dual view suggests learn better?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.modifications")
