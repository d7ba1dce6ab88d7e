"""The study of the uses of confidence: filtering, risk control, editing, step placement and guidance."""
