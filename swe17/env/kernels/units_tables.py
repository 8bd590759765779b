"""Units over matrices, points and images."""

import math

import numpy as np

from swe17.env.kernels.units import Unit


def distances_fast(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.sqrt(((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2))


def distances_loops(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  out = np.zeros((len(a), len(b)))
  for i in range(len(a)):
    for j in range(len(b)):
      total = 0.0
      for k in range(a.shape[1]):
        total += (a[i, k] - b[j, k]) ** 2
      out[i, j] = math.sqrt(total)
  return out


def distances_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.array([[np.linalg.norm(p - q) for q in b] for p in a])


def _points(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.normal(size=(size, 6)), rng.normal(size=(size + 1, 6))


def nearest_fast(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
  return ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)


def nearest_loops(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
  labels = []
  for p in points:
    best, label = float('inf'), 0
    for k in range(len(centres)):
      d = np.sqrt(np.sum((p - centres[k]) ** 2))
      if d < best:
        best, label = d, k
    labels.append(label)
  return np.array(labels)


def nearest_sorted(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
  labels = np.zeros(len(points), dtype=int)
  for i in range(len(points)):
    d = [sum((x - y) ** 2 for x, y in zip(points[i], c, strict=True)) for c in centres]
    labels[i] = d.index(sorted(d)[0])
  return labels


def _clusters(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.normal(size=(size, 5)), rng.normal(size=(8, 5))


def softmax_fast(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(axis=1, keepdims=True))
  return e / e.sum(axis=1, keepdims=True)


def softmax_scalars(x: np.ndarray) -> np.ndarray:
  out = np.zeros_like(x)
  for i in range(x.shape[0]):
    top = max(x[i])
    total = sum(math.exp(v - top) for v in x[i])
    for j in range(x.shape[1]):
      out[i, j] = math.exp(x[i, j] - top) / total
  return out


def softmax_rows(x: np.ndarray) -> np.ndarray:
  out = np.zeros((0, x.shape[1]))
  for row in x:
    e = np.exp(row - np.max(row))
    out = np.vstack([out, e / np.sum(e)])
  return out


def softmax_again(x: np.ndarray) -> np.ndarray:
  rows = []
  for row in x:
    rows.append([np.exp(v - row.max()) / np.exp(row - row.max()).sum() for v in row])
  return np.array(rows)


def _matrix(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (rng.normal(size=(size, max(size // 2, 2))),)


def standardise_fast(x: np.ndarray) -> np.ndarray:
  return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)


def standardise_again(x: np.ndarray) -> np.ndarray:
  out = x.copy()
  for j in range(x.shape[1]):
    for i in range(x.shape[0]):
      out[i, j] = (x[i, j] - x[:, j].mean()) / (x[:, j].std() + 1e-6)
  return out


def standardise_sums(x: np.ndarray) -> np.ndarray:
  out = np.empty(x.shape)
  n = len(x)
  for j in range(x.shape[1]):
    mean = sum(x[:, j]) / n
    variance = sum((v - mean) ** 2 for v in x[:, j]) / n
    for i in range(n):
      out[i, j] = (x[i, j] - mean) / (variance**0.5 + 1e-6)
  return out


def product_fast(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return a @ b


def product_loops(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  out = np.zeros((a.shape[0], b.shape[1]))
  for i in range(a.shape[0]):
    for j in range(b.shape[1]):
      for k in range(a.shape[1]):
        out[i, j] += a[i, k] * b[k, j]
  return out


def product_dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  rows = []
  for i in range(a.shape[0]):
    rows.append([np.sum(a[i] * b[:, j].copy()) for j in range(b.shape[1])])
  return np.array(rows)


def _factors(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.normal(size=(size, size + 1)), rng.normal(size=(size + 1, size))


def covariance_fast(x: np.ndarray) -> np.ndarray:
  centred = x - x.mean(axis=0)
  return centred.T @ centred / len(x)


def covariance_loops(x: np.ndarray) -> np.ndarray:
  d = x.shape[1]
  out = np.zeros((d, d))
  for i in range(d):
    for j in range(d):
      out[i, j] = np.mean((x[:, i] - np.mean(x[:, i])) * (x[:, j] - np.mean(x[:, j])))
  return out


def covariance_outer(x: np.ndarray) -> np.ndarray:
  out = np.zeros((x.shape[1], x.shape[1]))
  for row in x:
    out = out + np.outer(row - x.mean(axis=0), row - x.mean(axis=0))
  return out / len(x)


def blur_fast(image: np.ndarray, radius: int) -> np.ndarray:
  width = 2 * radius + 1
  padded = np.pad(image, radius, mode='edge')
  total = np.zeros((padded.shape[0] + 1, padded.shape[1] + 1))
  total[1:, 1:] = padded.cumsum(axis=0).cumsum(axis=1)
  window = total[width:, width:] - total[:-width, width:]
  window = window - total[width:, :-width] + total[:-width, :-width]
  return window / width**2


def blur_pixels(image: np.ndarray, radius: int) -> np.ndarray:
  height, width = image.shape
  out = np.zeros(image.shape)
  for y in range(height):
    for x in range(width):
      total, count = 0.0, 0
      for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
          row = min(max(y + dy, 0), height - 1)
          column = min(max(x + dx, 0), width - 1)
          total += image[row, column]
          count += 1
      out[y, x] = total / count
  return out


def blur_shifts(image: np.ndarray, radius: int) -> np.ndarray:
  width = 2 * radius + 1
  out = np.zeros(image.shape)
  for dy in range(width):
    for dx in range(width):
      padded = np.pad(image.copy(), radius, mode='edge')
      out = out + padded[dy : dy + image.shape[0], dx : dx + image.shape[1]]
  return out / width**2


def blur_padded(image: np.ndarray, radius: int) -> np.ndarray:
  out = np.empty(image.shape)
  for y in range(image.shape[0]):
    for x in range(image.shape[1]):
      padded = np.pad(image, radius, mode='edge')
      out[y, x] = padded[y : y + 2 * radius + 1, x : x + 2 * radius + 1].mean()
  return out


def _image(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int]:
  return rng.uniform(0, 255, (size, size + 3)), 2


def affinity_fast(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  return np.exp(-np.abs(x[:, None] - y[None, :]))


def affinity_scalars(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  return np.array([[math.exp(-abs(a - b)) for b in y] for a in x])


def affinity_filled(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  out = np.zeros((len(x), len(y)))
  for i in range(len(x)):
    for j in range(len(y)):
      out[i][j] = np.exp(-np.abs(x[i] - y[j]))
  return out


def _two(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
  return rng.normal(size=size), rng.normal(size=size + 2)


def tone_fast(image: np.ndarray, gamma: float) -> np.ndarray:
  table = np.array([int(255 * (v / 255) ** gamma + 0.5) for v in range(256)], np.uint8)
  return table[image]


def tone_pixels(image: np.ndarray, gamma: float) -> np.ndarray:
  out = np.empty_like(image)
  for y in range(image.shape[0]):
    for x in range(image.shape[1]):
      out[y, x] = int(255 * (int(image[y, x]) / 255) ** gamma + 0.5)
  return out


def tone_flat(image: np.ndarray, gamma: float) -> np.ndarray:
  values = []
  for v in image.flatten().tolist():
    values = [*values, int(255 * (v / 255) ** gamma + 0.5)]
  return np.array(values, dtype=np.uint8).reshape(image.shape)


def _gray(rng: np.random.Generator, size: int) -> tuple[np.ndarray, float]:
  image = rng.integers(0, 256, (size, size), dtype=np.uint8)
  return image, float(rng.uniform(0.4, 2.4))


def neighbours_fast(grid: np.ndarray) -> np.ndarray:
  padded = np.pad(grid.astype(np.int64), 1)
  rows = padded[:-2] + padded[1:-1] + padded[2:]
  return rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] - padded[1:-1, 1:-1]


def neighbours_cells(grid: np.ndarray) -> np.ndarray:
  out = np.zeros(grid.shape, dtype=np.int64)
  for y in range(grid.shape[0]):
    for x in range(grid.shape[1]):
      for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
          inside = 0 <= y + dy < grid.shape[0] and 0 <= x + dx < grid.shape[1]
          if (dy or dx) and inside and grid[y + dy, x + dx]:
            out[y, x] += 1
  return out


def neighbours_sets(grid: np.ndarray) -> np.ndarray:
  alive = [(int(y), int(x)) for y, x in np.argwhere(grid)]
  out = np.zeros(grid.shape, dtype=np.int64)
  for y, x in alive:
    for dy, dx in [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]:
      if 0 <= y + dy < len(grid) and 0 <= x + dx < len(grid[0]):
        out[y + dy, x + dx] += 1
  return out


def _cells(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (rng.random((size, size + 1)) < 0.4,)


UNITS = (
  Unit(
    'distances',
    distances_fast,
    {'loops': distances_loops, 'pairs': distances_pairs},
    _points,
    {'': 60, 'loops': 45},
  ),
  Unit(
    'nearest',
    nearest_fast,
    {'loops': nearest_loops, 'sorted': nearest_sorted},
    _clusters,
    {'': 300},
  ),
  Unit(
    'softmax',
    softmax_fast,
    {'scalars': softmax_scalars, 'again': softmax_again, 'rows': softmax_rows},
    _matrix,
    {'': 60, 'scalars': 160, 'rows': 300},
  ),
  Unit(
    'standardise',
    standardise_fast,
    {'again': standardise_again, 'sums': standardise_sums},
    _matrix,
    {'': 40, 'sums': 140},
  ),
  Unit(
    'product',
    product_fast,
    {'loops': product_loops, 'dots': product_dots},
    _factors,
    {'': 60, 'loops': 30},
  ),
  Unit(
    'covariance',
    covariance_fast,
    {'loops': covariance_loops, 'outer': covariance_outer},
    _matrix,
    {'': 60, 'outer': 200},
  ),
  Unit(
    'blur',
    blur_fast,
    {'pixels': blur_pixels, 'padded': blur_padded, 'shifts': blur_shifts},
    _image,
    {'': 18, 'shifts': 200},
    small=(3, 4, 7),
  ),
  Unit(
    'affinity',
    affinity_fast,
    {'scalars': affinity_scalars, 'filled': affinity_filled},
    _two,
    {'': 90},
  ),
  Unit('tone', tone_fast, {'pixels': tone_pixels, 'flat': tone_flat}, _gray, {'': 70}),
  Unit(
    'neighbours',
    neighbours_fast,
    {'cells': neighbours_cells, 'sets': neighbours_sets},
    _cells,
    {'': 50},
  ),
)
