"""The report: figures, tables, and one page that needs nothing but a browser."""

from fmwc.report.checkerboard import write_figures, write_report
from fmwc.report.page import Section, write_page

__all__ = ["Section", "write_figures", "write_page", "write_report"]
