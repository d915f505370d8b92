"""The classifier lab: a language model trained to classify in context, against the one built to take one step."""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.run.classifier")
