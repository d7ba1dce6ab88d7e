"""The cost of confidence in time and memory."""
