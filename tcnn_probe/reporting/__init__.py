"""A recording, or attention maps, as one page
that a browser shows without a network; a recording needs Bokeh.
"""

from tcnn_probe.reporting.explorer import explore
from tcnn_probe.reporting.report import Report, report

__all__ = ["Report", "explore", "report"]
