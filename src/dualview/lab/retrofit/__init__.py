"""The retrofit lab: does momentum attention help a pretrained language model, where few-shot prompts work?"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.retrofit")
