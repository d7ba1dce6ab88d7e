"""What confidence is for. Scores and filtering are methods of a :class:`fmwc.Trajectory`; learned heads are here."""
