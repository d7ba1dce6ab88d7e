"""The paper's first setting: a flow onto eight cells of a chequered board."""
