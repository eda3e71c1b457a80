"""Steps whose gradient norm is far from the last ones': skipped, as OLMo 2 does (OLMo Team 2024, SkipStepOptimizer)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev

WINDOW = 128
"""Norms that are looked back at."""
FEWEST = 16
"""Norms before the first judgement: a run's first steps differ widely."""


@dataclass(frozen=True)
class Outliers:
    """The norms lie in the run's state: a resumed run judges as the whole one."""

    deviations: float | None
    """standard deviations above the mean from which a norm is one; None: none is"""

    def found(self, norm: float, norms: list[float]) -> bool:
        """Whether this norm is one beside those of the steps before."""
        if self.deviations is None or len(norms) < FEWEST or not isfinite(norm):
            return False
        return norm > fmean(norms) + self.deviations * stdev(norms)

    def remember(self, norm: float, norms: list[float]) -> None:
        """Outliers too: where norms have grown for good, they are soon none."""
        if self.deviations is not None and isfinite(norm):
            norms.append(norm)
            del norms[:-WINDOW]
