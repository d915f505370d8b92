"""Reports: results as tables, figures and one HTML file. `dualview.report(...)` writes one."""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.build.report")
