"""Paired statistics on samples: bootstrap intervals and McNemar's test. docs/reports.md, "Statistics".

Arrays with a first axis of samples hold NaN where a sample was not measured.
"""

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
BLOCK_VALUES = 1 << 22  # drawn numbers held at a time: 32 MiB


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with the ends of its 95 % interval; both ends are NaN when no stratum has two samples."""

    mean: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Bootstrap:
    """Means of columns and their values in every resample."""

    means: np.ndarray  # [columns]
    draws: np.ndarray  # [resamples, columns]
    varies: np.ndarray  # [columns], whether some stratum has at least two samples

    def estimate(self, column):
        return self._interval(self.means[column], self.draws[:, column], self.varies[column])

    def quotient(self, numerator, denominator):
        """The quotient of two means; numerator and denominator come from the same resamples."""
        if not self.means[denominator] > 0:
            return NOTHING
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = self.draws[:, numerator] / self.draws[:, denominator]
        mean = self.means[numerator] / self.means[denominator]
        return self._interval(mean, draws[np.isfinite(draws)], self.varies[numerator])

    @staticmethod
    def _interval(mean, draws, varies):
        draws = draws[~np.isnan(draws)]
        if not varies or draws.size == 0:
            return Estimate(float(mean), math.nan, math.nan)
        low, high = np.percentile(draws, [2.5, 97.5])
        return Estimate(float(mean), float(low), float(high))


def bootstrap(strata, seed=0, resamples=RESAMPLES):
    """Resamples the samples of each stratum with replacement. strata: one array [samples, columns] per stratum.

    A column's mean is the plain mean over strata of the stratum's mean. All columns share each resample, so that
    differences and quotients of columns are paired. Strata in which a column has no value do not count for it.
    """
    rng = np.random.default_rng(seed)
    strata = [np.asarray(values, dtype=float) for values in strata]
    columns = strata[0].shape[1]
    total, used = np.zeros((resamples, columns)), np.zeros((resamples, columns))
    for values in strata:
        means = _resampled_means(values, rng, resamples)
        total += np.nan_to_num(means)
        used += ~np.isnan(means)
    means = np.full((len(strata), columns), np.nan)
    counts = np.array([(~np.isnan(values)).sum(axis=0) for values in strata])
    for row, values in enumerate(strata):
        measured = counts[row] > 0
        means[row, measured] = np.nanmean(values[:, measured], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        point = np.nansum(means, axis=0) / (counts > 0).sum(axis=0)
        draws = total / used
    return Bootstrap(point, draws, (counts > 1).any(axis=0))


def _resampled_means(values, rng, resamples):
    samples = values.shape[0]
    measured = ~np.isnan(values)
    filled = np.where(measured, values, 0.0)
    means = np.empty((resamples, values.shape[1]))
    block = max(1, BLOCK_VALUES // samples)
    for begin in range(0, resamples, block):
        rows = min(block, resamples - begin)
        picks = rng.integers(0, samples, (rows, samples)) + samples * np.arange(rows)[:, None]
        times = np.bincount(picks.ravel(), minlength=rows * samples).reshape(rows, samples).astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            means[begin:begin + rows] = (times @ filled) / (times @ measured)
    return means


def mcnemar(only_first, only_second):
    """Exact two-sided p that two paired yes/no results differ, from the two counts of disagreement."""
    disagreements = only_first + only_second
    tail = sum(math.comb(disagreements, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**disagreements)
