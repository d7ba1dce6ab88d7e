"""Domains: defaults, tables, files and pages of the commands for points, digits, crystals and your own data."""

from fmwc.domains.registry import DOMAINS, domain_named, domain_of, open_checkpoint

__all__ = ["DOMAINS", "domain_named", "domain_of", "open_checkpoint"]
