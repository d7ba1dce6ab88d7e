"""The `fmwc` command: `python -m fmwc` does the same."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line. What is wrong with the input is one line on stderr, and exit code 2."""
    try:
        from fmwc.cli import app
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "fmwc":
            raise
        print(f"fmwc: the command line needs '{error.name}'; install it with: pip install 'fmwc[cli]'", file=sys.stderr)
        sys.exit(2)
    from fmwc.errors import FmwcError

    try:
        app()
    except (FmwcError, OSError) as error:  # OSError: a path that cannot be read or written
        print(f"fmwc: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
