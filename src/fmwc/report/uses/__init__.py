"""What a study of the uses of confidence found: tables, figures and a page, made from its folder and nothing else."""

from fmwc.report.uses.page import Written, write_study

__all__ = ["Written", "write_study"]
