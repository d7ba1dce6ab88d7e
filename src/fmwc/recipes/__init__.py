"""Training recipes. Each is a frozen dataclass whose comments give the reason for its values."""
