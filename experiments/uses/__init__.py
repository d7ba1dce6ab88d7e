"""What confidence is for, measured on each setting: filters, promises, edits, steps, rewinds and guidance."""
