"""Runs before any test module is imported: no hub access, caches in a folder that goes away."""

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_cache = tempfile.mkdtemp(prefix="traceap-tests-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
# OpenMP's threads spin while they wait; beside other test processes that made a step ten times as long.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.update(
    HF_HOME=_cache, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

# pytest would keep all that the compiler notes on its way, which takes longer than compiling.
logging.getLogger("torch.__trace").disabled = True

# Helpers of the tests are plain modules (`from traces import random_record`), whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on a single thread: tiny operators are quicker so, and have one order of summation."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
