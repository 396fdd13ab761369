"""A recording as one page that a browser shows without a network; needs Bokeh."""

from tcnn_probe.reporting.report import Report, report

__all__ = ["Report", "report"]
