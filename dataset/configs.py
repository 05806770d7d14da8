"""The configs of the data set: the schema that all files of one share, and how files are named."""

from __future__ import annotations

import re

from torchtraceap.dataset import schema
from torchtraceap.dataset.windows import WINDOWS

SCHEMAS = {
    "traces": schema.TRACES,
    "windows": WINDOWS,
    "segments": schema.SEGMENTS,
    "costs": schema.COSTS,
    "hardware": schema.HARDWARE,
}

DATA_FILE = re.compile(rf"({'|'.join(SCHEMAS)})-({'|'.join(schema.SPLITS)})-\d{{5}}-of-\d{{5}}\.parquet")
"""Name of a file in ``data/``; ``features.shard_path`` makes them."""
