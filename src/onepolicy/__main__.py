"""The entry point of `onepolicy` and `python -m onepolicy`."""

import sys


def run() -> int:
    """Run the command line and return its exit status."""
    try:
        from onepolicy.cli import main  # takes a moment, in which Ctrl-C may come

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("\nonepolicy: stopped by Ctrl-C\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
