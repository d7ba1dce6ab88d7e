"""Domains: what the commands know about each kind of sample (points, digits, crystals, data of your own)."""

from fmwc.domains.registry import DOMAINS, domain_named, domain_of, open_checkpoint

__all__ = ["DOMAINS", "domain_named", "domain_of", "open_checkpoint"]
