"""Confidence for other libraries. Each module needs its library; importing this package needs none."""
