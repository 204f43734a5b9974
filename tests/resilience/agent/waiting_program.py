"""A program that ends well when the test lets it."""

import os
from pathlib import Path

Path(os.environ["LET_GO"]).read_bytes()
