"""`python -m onepolicy.cli`, for torchrun. `python -m onepolicy` also catches Ctrl-C in the first imports."""

import sys

from onepolicy.__main__ import run

sys.exit(run())
