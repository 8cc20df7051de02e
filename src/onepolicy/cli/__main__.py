"""`python -m onepolicy.cli`."""

import sys

from onepolicy.cli import main

sys.exit(main())
