"""`acclimate` and `python -m acclimate`.

Imports next to nothing on purpose: Ctrl-C ends the process with one line and exit code 130 also while all the rest is imported.
"""

import sys


def run() -> None:
    """Run the command line of this process, and end it."""
    try:
        from acclimate.command import carry_out

        carry_out()
    except KeyboardInterrupt:
        try:
            sys.stderr.write("interrupted\n")
        except OSError:
            # Who would read it is gone.
            pass
        sys.exit(130)


if __name__ == "__main__":
    run()
