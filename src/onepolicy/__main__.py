"""The command `onepolicy`, and `python -m onepolicy`: the command line, from its first import on."""

import sys


def run() -> int:
    """Run the command line; its exit status."""
    try:
        from onepolicy.cli import main  # takes a moment, in which Ctrl-C may come

        return main()
    except KeyboardInterrupt:
        print("\nonepolicy: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
