"""Figures, tables, and self-contained pages."""

from fmwc.report.page import Picture, Section, write_page
from fmwc.report.table import Table

__all__ = ["Picture", "Section", "Table", "write_page"]
