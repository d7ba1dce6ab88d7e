"""The Checkerboard: a flow onto eight cells of a chequered board."""
