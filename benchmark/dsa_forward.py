"""Times the forward of sparse attention: this project's backends and every installed peer, in one run.

    python benchmark/dsa_forward.py --heads 128 --csv results.csv --plot results.png

See peers.py for the sides, selections.py for the dials of the selection.
"""

import sys

from side_by_side import main

if __name__ == "__main__":
    sys.exit(main("forward", __doc__))
