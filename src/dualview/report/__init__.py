"""Reports: results as tables, figures and one HTML file. `dualview.report(...)` writes one.

A new number: one entry in `catalogue`. A new figure: its data as a `Chart` in `charts/`, listed in `run_charts` or
`group_charts`, which the page draws; a function in `figures/` that hands the same chart to `draw`, and a line in
`dualview/plot.py`. A new table: a `TextTable`, which every renderer knows.
"""

from dualview.io.callable_package import make_callable

make_callable(__name__, f"{__name__}.build.report")
