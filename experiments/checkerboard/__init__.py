"""The Checkerboard: a flow to eight cells of a checkerboard."""
