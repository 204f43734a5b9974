"""Training with AWS's library, which is told where its daemon is; runs in AWS's environment.

Their own way there is a host name, or a proxy, which a client of S3 would take, too.
"""

from __future__ import annotations

import os
import sys

from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig

from recipes_training.__main__ import main

if __name__ == "__main__":
    InMemoryClientConfig.__init__.__defaults__ = (os.environ["TEST_DOOR"], 60.0, 0, 1.5, True)
    sys.exit(main())
