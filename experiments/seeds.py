"""Intervals over a handful of seeds: mean and Student's t, for sweeps and benches.

  mean +- t(n - 1) s / sqrt(n)

Two-sided 95 %, on the assumption that seeds are draws from a normal distribution, which
three or five of them cannot test. Within one run, intervals come from a bootstrap over
functions instead (`swe17.metrics.statistics`).
"""

from collections.abc import Sequence
import math
import statistics

# The .975 quantile of Student's t by degrees of freedom, from 1.
T_975 = (
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
  2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
  2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
  """(mean, low, high) at 95 %; the ends are None for one seed: it has no spread.

  ValueError on no value or one that is not finite.
  """
  if not values or not all(math.isfinite(v) for v in values):
    raise ValueError(f'interval over seeds: got {list(values)}, want finite values')
  mean = statistics.fmean(values)
  if len(values) == 1:
    return mean, None, None
  # Beyond the table its last row: a little too wide, never too narrow.
  t = T_975[min(len(values) - 1, len(T_975)) - 1]
  half = t * statistics.stdev(values) / math.sqrt(len(values))
  return mean, mean - half, mean + half
