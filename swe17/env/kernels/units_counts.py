"""Units that count, search, group and look up."""

import collections
import math

import numpy as np

from swe17.env.kernels.units import Unit


def histogram_fast(labels: np.ndarray, k: int) -> np.ndarray:
  return np.bincount(labels, minlength=k)


def histogram_loop(labels: np.ndarray, k: int) -> np.ndarray:
  counts = np.zeros(k, dtype=np.int64)
  for label in labels:
    counts[label] += 1
  return counts


def histogram_sums(labels: np.ndarray, k: int) -> np.ndarray:
  return np.array([sum(labels == c) for c in range(k)])


def histogram_list(labels: np.ndarray, k: int) -> np.ndarray:
  counts = []
  for c in range(k):
    counts.append(list(labels).count(c))
  return np.array(counts)


def _labels(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int]:
  return rng.integers(0, 12, size), 12


def group_means_fast(values: np.ndarray, group: np.ndarray, k: int) -> np.ndarray:
  count = np.bincount(group, minlength=k)
  total = np.bincount(group, weights=values, minlength=k)
  return total / np.maximum(count, 1)


def group_means_lists(values: np.ndarray, group: np.ndarray, k: int) -> np.ndarray:
  means = []
  for g in range(k):
    mine = [v for v, h in zip(values, group, strict=True) if h == g]
    means.append(sum(mine) / len(mine) if mine else 0.0)
  return np.array(means)


def group_means_dict(values: np.ndarray, group: np.ndarray, k: int) -> np.ndarray:
  groups: dict[int, np.ndarray] = {}
  for i in range(len(values)):
    old = groups.get(int(group[i]), np.array([]))
    groups[int(group[i])] = np.append(old, values[i])
  return np.array([groups[g].mean() if g in groups else 0.0 for g in range(k)])


def _groups(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray, int]:
  return rng.normal(size=size), rng.integers(0, 15, size), 15


def ranks_fast(x: np.ndarray) -> np.ndarray:
  return np.searchsorted(np.sort(x), x, side='left')


def ranks_counted(x: np.ndarray) -> np.ndarray:
  out = np.zeros(len(x), dtype=np.int64)
  for i in range(len(x)):
    out[i] = sum(1 for other in x if other < x[i])
  return out


def ranks_index(x: np.ndarray) -> np.ndarray:
  return np.array([sorted(x.tolist()).index(v) for v in x.tolist()])


def _ties(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (rng.integers(0, max(2 * size, 2), size).astype(float),)


def one_hot_fast(labels: np.ndarray, k: int) -> np.ndarray:
  out = np.zeros((len(labels), k))
  out[np.arange(len(labels)), labels] = 1.0
  return out


def one_hot_cells(labels: np.ndarray, k: int) -> np.ndarray:
  return np.array([[1.0 if label == c else 0.0 for c in range(k)] for label in labels])


def one_hot_stack(labels: np.ndarray, k: int) -> np.ndarray:
  out = np.zeros((0, k))
  for label in labels:
    row = np.zeros((1, k))
    row[0, label] = 1.0
    out = np.concatenate([out, row])
  return out


def common_fast(a: list[int], b: list[int]) -> list[int]:
  there = set(b)
  return [x for x in a if x in there]


def common_list(a: list[int], b: list[int]) -> list[int]:
  found = []
  for x in a:
    if x in b:
      found.append(x)
  return found


def common_copies(a: list[int], b: list[int]) -> list[int]:
  found: list[int] = []
  for x in a:
    if b.count(x) > 0:
      found = found + [x]
  return found


def _lists(rng: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
  top = max(4 * size, 2)
  return rng.integers(0, top, size).tolist(), rng.integers(0, top, size).tolist()


def distinct_fast(items: list[int]) -> list[int]:
  return list(dict.fromkeys(items))


def distinct_list(items: list[int]) -> list[int]:
  out = []
  for item in items:
    if item not in out:
      out.append(item)
  return out


def distinct_prefix(items: list[int]) -> list[int]:
  return [x for i, x in enumerate(items) if x not in items[:i]]


def _items(rng: np.random.Generator, size: int) -> tuple[list[int]]:
  return (rng.integers(0, max(size // 2, 2), size).tolist(),)


def pairs_fast(items: list[int], target: int) -> int:
  count, seen = 0, collections.Counter()
  for x in items:
    count += seen[target - x]
    seen[x] += 1
  return count


def pairs_loops(items: list[int], target: int) -> int:
  count = 0
  for i in range(len(items)):
    for j in range(len(items)):
      if i < j and items[i] + items[j] == target:
        count += 1
  return count


def pairs_slices(items: list[int], target: int) -> int:
  return sum(items[i + 1 :].count(target - items[i]) for i in range(len(items)))


def _target(rng: np.random.Generator, size: int) -> tuple[list[int], int]:
  return rng.integers(0, 60, size).tolist(), 60


def word_counts_fast(words: list[str]) -> dict[str, int]:
  return dict(collections.Counter(words))


def word_counts_count(words: list[str]) -> dict[str, int]:
  return {word: words.count(word) for word in words}


def word_counts_scan(words: list[str]) -> dict[str, int]:
  counts = {}
  for word in sorted(set(words)):
    total = 0
    for other in words:
      if other == word:
        total = total + 1
    counts[word] = total
  return counts


def _words(rng: np.random.Generator, size: int) -> tuple[list[str]]:
  return ([f'w{n}' for n in rng.integers(0, max(size // 6, 2), size).tolist()],)


def primes_fast(n: int) -> list[int]:
  prime = np.ones(max(n, 2), dtype=bool)
  prime[:2] = False
  for p in range(2, math.isqrt(n) + 1):
    if prime[p]:
      prime[p * p :: p] = False
  return np.flatnonzero(prime[:n]).tolist()


def primes_division(n: int) -> list[int]:
  return [m for m in range(2, n) if all(m % d != 0 for d in range(2, m))]


def primes_root(n: int) -> list[int]:
  primes = []
  for m in range(2, n):
    if all([m % d for d in range(2, math.isqrt(m) + 1)]):
      primes.append(m)
  return primes


def primes_lists(n: int) -> list[int]:
  left, primes = list(range(2, n)), []
  while left:
    p = left[0]
    primes.append(p)
    left = [m for m in left if m % p != 0]
  return primes


def _bound(rng: np.random.Generator, size: int) -> tuple[int]:
  return (size + int(rng.integers(0, 1 + size // 8)),)


def fibonacci_fast(ns: list[int], m: int) -> list[int]:
  table = [0, 1]
  for _ in range(max(ns, default=0)):
    table.append((table[-1] + table[-2]) % m)
  return [table[n] % m for n in ns]


def fibonacci_again(ns: list[int], m: int) -> list[int]:
  out = []
  for n in ns:
    a, b = 0, 1
    for _ in range(n):
      a, b = b, (a + b) % m
    out.append(a % m)
  return out


def fibonacci_sorted(ns: list[int], m: int) -> list[int]:
  known: dict[int, int] = {}
  for n in sorted(ns):
    a, b = 0, 1
    for _ in range(n if n not in known else 0):
      a, b = b, (a + b) % m
    known[n] = known.get(n, a % m)
  return [known[n] for n in ns]


def fibonacci_large(ns: list[int], m: int) -> list[int]:
  def fib(n: int) -> int:
    a, b = 0, 1
    while n > 0:
      a, b = b, a + b
      n -= 1
    return a

  return [fib(n) % m for n in ns]


def _places(rng: np.random.Generator, size: int) -> tuple[list[int], int]:
  return rng.integers(0, 300, size).tolist(), 1_000_003


def popcount_fast(values: np.ndarray) -> np.ndarray:
  return np.unpackbits(values.view(np.uint8).reshape(-1, 4), axis=1).sum(
    axis=1, dtype=np.int64
  )


def popcount_strings(values: np.ndarray) -> np.ndarray:
  return np.array([bin(int(v)).count('1') for v in values], dtype=np.int64)


def popcount_shifts(values: np.ndarray) -> np.ndarray:
  out = []
  for value in values.tolist():
    bits = 0
    for shift in range(32):
      bits += (value >> shift) & 1
    out.append(bits)
  return np.array(out, dtype=np.int64)


def _bits(rng: np.random.Generator, size: int) -> tuple[np.ndarray]:
  return (rng.integers(0, 1 << 32, size, dtype=np.uint32),)


UNITS = (
  Unit(
    'histogram',
    histogram_fast,
    {'loop': histogram_loop, 'sums': histogram_sums, 'list': histogram_list},
    _labels,
    {'': 3000, 'loop': 12000},
  ),
  Unit(
    'group_means',
    group_means_fast,
    {'lists': group_means_lists, 'dict': group_means_dict},
    _groups,
    {'': 2500},
  ),
  Unit(
    'ranks',
    ranks_fast,
    {'counted': ranks_counted, 'index': ranks_index},
    _ties,
    {'': 300},
  ),
  Unit(
    'one_hot',
    one_hot_fast,
    {'cells': one_hot_cells, 'stack': one_hot_stack},
    _labels,
    {'': 1500},
  ),
  Unit(
    'common',
    common_fast,
    {'list': common_list, 'copies': common_copies},
    _lists,
    {'': 1000},
  ),
  Unit(
    'distinct',
    distinct_fast,
    {'list': distinct_list, 'prefix': distinct_prefix},
    _items,
    {'': 1800, 'prefix': 1200},
  ),
  Unit(
    'pairs',
    pairs_fast,
    {'loops': pairs_loops, 'slices': pairs_slices},
    _target,
    {'': 350, 'slices': 1200},
  ),
  Unit(
    'word_counts',
    word_counts_fast,
    {'count': word_counts_count, 'scan': word_counts_scan},
    _words,
    {'': 900},
  ),
  Unit(
    'primes',
    primes_fast,
    {'division': primes_division, 'lists': primes_lists, 'root': primes_root},
    _bound,
    {'': 1500, 'lists': 4000, 'root': 5000},
  ),
  Unit(
    'fibonacci',
    fibonacci_fast,
    {
      'again': fibonacci_again,
      'large': fibonacci_large,
      'sorted': fibonacci_sorted,
    },
    _places,
    {'': 1000},
  ),
  Unit(
    'popcount',
    popcount_fast,
    {'strings': popcount_strings, 'shifts': popcount_shifts},
    _bits,
    {'': 20000, 'shifts': 6000},
  ),
)
