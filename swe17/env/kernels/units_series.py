"""Units over one-dimensional series and signals."""

import bisect

import numpy as np

from swe17.env.kernels.units import Unit


def _series(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (rng.normal(size=size),)


def _windowed(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int]:
  return rng.normal(size=size), max(1, min(size, 25 + int(rng.integers(10))))


def moving_average_fast(x: np.ndarray, width: int) -> np.ndarray:
  total = np.concatenate(([0.0], np.cumsum(x)))
  return (total[width:] - total[:-width]) / width


def moving_average_slices(x: np.ndarray, width: int) -> np.ndarray:
  means = []
  for start in range(len(x) - width + 1):
    window = x[start : start + width]
    means.append(np.mean(window))
  return np.array(means)


def moving_average_loops(x: np.ndarray, width: int) -> np.ndarray:
  out = np.zeros(len(x) - width + 1)
  for i in range(len(out)):
    total = 0.0
    for j in range(width):
      total += x[i + j]
    out[i] = total / width
  return out


def moving_average_append(x: np.ndarray, width: int) -> np.ndarray:
  out = np.array([])
  for i in range(len(x) - width + 1):
    out = np.append(out, sum(x[i : i + width]) / width)
  return out


def rolling_max_fast(x: np.ndarray, width: int) -> np.ndarray:
  return np.lib.stride_tricks.sliding_window_view(x, width).max(axis=1)


def rolling_max_builtin(x: np.ndarray, width: int) -> np.ndarray:
  out = np.empty(len(x) - width + 1)
  for i in range(len(out)):
    out[i] = max(x[i : i + width])
  return out


def rolling_max_sorted(x: np.ndarray, width: int) -> np.ndarray:
  values = [float(v) for v in x]
  out = []
  for i in range(len(values) - width + 1):
    out.append(sorted(values[i : i + width])[-1])
  return np.array(out)


def running_total_fast(x: np.ndarray) -> np.ndarray:
  return np.cumsum(x)


def running_total_again(x: np.ndarray) -> np.ndarray:
  totals = []
  for i in range(len(x)):
    totals.append(np.sum(x[: i + 1]))
  return np.array(totals)


def running_total_append(x: np.ndarray) -> np.ndarray:
  totals = np.empty(0)
  total = 0.0
  for value in x:
    total = total + value
    totals = np.append(totals, total)
  return totals


def convolve_fast(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
  return np.convolve(x, kernel)


def convolve_loops(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x) + len(kernel) - 1)
  for i in range(len(x)):
    for j in range(len(kernel)):
      out[i + j] += x[i] * kernel[j]
  return out


def convolve_shifts(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x) + len(kernel) - 1)
  for i in range(len(x)):
    out[i : i + len(kernel)] += x[i] * kernel
  return out


def convolve_windows(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
  m = len(kernel)
  out = []
  for n in range(len(x) + m - 1):
    padded = np.concatenate([np.zeros(m - 1), x, np.zeros(m - 1)])
    out.append(np.dot(padded[n : n + m], kernel[::-1]))
  return np.array(out)


def _filtered(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.normal(size=size), rng.normal(size=min(size, 15))


def interpolate_fast(x: np.ndarray, at: np.ndarray, value: np.ndarray) -> np.ndarray:
  return np.interp(x, at, value)


def interpolate_scan(x: np.ndarray, at: np.ndarray, value: np.ndarray) -> np.ndarray:
  out = np.empty(len(x))
  for k in range(len(x)):
    if x[k] <= at[0]:
      out[k] = value[0]
    elif x[k] >= at[-1]:
      out[k] = value[-1]
    else:
      i = 0
      while at[i + 1] < x[k]:
        i += 1
      share = (x[k] - at[i]) / (at[i + 1] - at[i])
      out[k] = value[i] + share * (value[i + 1] - value[i])
  return out


def interpolate_bisect(x: np.ndarray, at: np.ndarray, value: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x))
  for k, point in enumerate(x):
    i = min(max(bisect.bisect_right(at.tolist(), point) - 1, 0), len(at) - 2)
    share = (point - at[i]) / (at[i + 1] - at[i])
    share = min(max(share, 0.0), 1.0)
    out[k] = value[i] + share * (value[i + 1] - value[i])
  return out


def interpolate_masks(x: np.ndarray, at: np.ndarray, value: np.ndarray) -> np.ndarray:
  out = []
  for point in x:
    if point <= at[0] or point >= at[-1]:
      out.append(value[0] if point <= at[0] else value[-1])
      continue
    i = np.where(at <= point)[0].max()
    slope = np.diff(value) / np.diff(at)
    out.append(value[i] + slope[i] * (point - at[i]))
  return np.array(out)


def _table(
  rng: np.random.Generator, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  at = np.cumsum(rng.uniform(0.5, 1.5, max(size // 4, 2)))
  return rng.uniform(-1, at[-1] + 2, size), at, rng.normal(size=at.size)


def run_lengths_fast(x: np.ndarray) -> list[list[int]]:
  if not len(x):
    return []
  edge = np.flatnonzero(np.diff(x)) + 1
  start = np.concatenate(([0], edge))
  length = np.diff(np.concatenate((start, [len(x)])))
  return [list(pair) for pair in zip(x[start].tolist(), length.tolist(), strict=True)]


def run_lengths_scan(x: np.ndarray) -> list[list[int]]:
  runs: list[list[int]] = []
  for i in range(len(x)):
    if runs and runs[-1][0] == x[i]:
      runs[-1][1] += 1
    else:
      runs.append([int(x[i]), 1])
  return runs


def run_lengths_rest(x: np.ndarray) -> list[list[int]]:
  runs = []
  rest = list(x)
  while rest:
    n = 1
    while n < len(rest) and rest[n] == rest[0]:
      n += 1
    runs.append([int(rest[0]), n])
    rest = rest[n:]
  return runs


def _runs(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (np.repeat(rng.integers(0, 9, size), rng.integers(1, 12, size)),)


def overlaps_fast(start: np.ndarray, end: np.ndarray, point: np.ndarray) -> np.ndarray:
  begun = np.searchsorted(np.sort(start), point, side='right')
  return begun - np.searchsorted(np.sort(end), point, side='left')


def overlaps_loops(start: np.ndarray, end: np.ndarray, point: np.ndarray) -> np.ndarray:
  out = np.zeros(len(point), dtype=int)
  for k, p in enumerate(point):
    for a, b in zip(start, end, strict=True):
      if a <= p and p <= b:
        out[k] += 1
  return out


def overlaps_masks(start: np.ndarray, end: np.ndarray, point: np.ndarray) -> np.ndarray:
  return np.array([sum((start <= p) & (p <= end)) for p in point])


def _intervals(
  rng: np.random.Generator, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  start = rng.uniform(0, 100, size)
  return start, start + rng.uniform(0, 10, size), rng.uniform(0, 110, size)


def polynomial_fast(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x))
  for c in coefficients[::-1]:
    out = out * x + c
  return out


def polynomial_powers(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
  out = []
  for point in x:
    out.append(sum(c * point**k for k, c in enumerate(coefficients)))
  return np.array(out)


def polynomial_products(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x))
  for i in range(len(x)):
    for k in range(len(coefficients)):
      term = coefficients[k]
      for _ in range(k):
        term = term * x[i]
      out[i] = out[i] + term
  return out


def _polynomial(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.uniform(0.5, 1, 9), rng.uniform(0.1, 1.1, size)


UNITS = (
  Unit(
    'moving_average',
    moving_average_fast,
    {
      'slices': moving_average_slices,
      'loops': moving_average_loops,
      'append': moving_average_append,
    },
    _windowed,
    {'': 1200},
  ),
  Unit(
    'rolling_max',
    rolling_max_fast,
    {'builtin': rolling_max_builtin, 'sorted': rolling_max_sorted},
    _windowed,
    {'': 3000},
  ),
  Unit(
    'running_total',
    running_total_fast,
    {'again': running_total_again, 'append': running_total_append},
    _series,
    {'': 2000},
  ),
  Unit(
    'convolve',
    convolve_fast,
    {
      'loops': convolve_loops,
      'windows': convolve_windows,
      'shifts': convolve_shifts,
    },
    _filtered,
    {'': 2000, 'loops': 1500, 'shifts': 4000},
  ),
  Unit(
    'interpolate',
    interpolate_fast,
    {
      'scan': interpolate_scan,
      'masks': interpolate_masks,
      'bisect': interpolate_bisect,
    },
    _table,
    {'': 700, 'scan': 500},
    small=(2, 5, 9, 20),
  ),
  Unit(
    'run_lengths',
    run_lengths_fast,
    {'scan': run_lengths_scan, 'rest': run_lengths_rest},
    _runs,
    {'': 3000, 'rest': 1000},
  ),
  Unit(
    'overlaps',
    overlaps_fast,
    {'loops': overlaps_loops, 'masks': overlaps_masks},
    _intervals,
    {'': 400, 'loops': 250},
  ),
  Unit(
    'polynomial',
    polynomial_fast,
    {'powers': polynomial_powers, 'products': polynomial_products},
    _polynomial,
    {'': 800},
  ),
)
