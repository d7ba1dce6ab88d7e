"""The studio: a local web application to draw samples, look at them by confidence, edit, and export them.

The modules, in the order in which a request passes through them: :mod:`server` answers requests of the page
(`fmwc/web`), :mod:`runs` keeps runs on disk and starts jobs, :mod:`worker` runs the jobs one after another, and
:mod:`models` and :mod:`samples` describe checkpoints and samples to the page. :mod:`recipe` writes the command and the
Python lines that make a run. Requires the extra `studio`.
"""
