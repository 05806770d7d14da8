"""Many cost measurements at once: how few of the instances called costly are so by chance."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FALSE_DISCOVERY_RATE = 0.02
"""Expected share, among the instances of a release that are called costly, of those that are not."""


def discoveries(p_values: ArrayLike, rate: float = FALSE_DISCOVERY_RATE) -> NDArray[np.bool_]:
    """Which hypotheses Benjamini and Hochberg's step-up procedure rejects.

    With the p-values sorted, all up to the last one at rank k of m with p <= k / m * ``rate`` are rejected.

    Args:
        p_values: Of every instance tested, whatever came of it, shape (tests,). A subset of the tests (say,
            of the promising ones) would void the guarantee.
        rate: False discovery rate to hold.

    Returns:
        bool, shape (tests,), in the order given.

    Raises:
        ValueError: A p-value is not in [0, 1].
    """
    from scipy.stats import false_discovery_control  # takes a second to import

    p = np.asarray(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p-values lie in [0, 1]")
    return false_discovery_control(p, method="bh") <= rate if len(p) else np.zeros(0, dtype=bool)
