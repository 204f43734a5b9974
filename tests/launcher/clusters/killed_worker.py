"""A worker that says a word and trains; the one of rank TEST_RANK is killed in step TEST_STEP."""

from __future__ import annotations

import sys

from tests.training.programs import be_killed_once

WORD = "a word of a worker"

if __name__ == "__main__":
    sys.stdout.write(f"{WORD}\n")
    sys.stdout.flush()
    sys.exit(be_killed_once(sys.argv[1:]))
