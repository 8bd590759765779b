"""Tries a store before a run does: every operation that a run needs, one line each.

  python -m launch.preflight --store=gs://my-bucket/my-run

Run it on every kind of machine that takes part: learner, samplers, rollouts. Each
check works on fresh keys under preflight/<id>/ and they are removed at the end;
nothing else in the store is touched.

  PASS  as it should be
  WARN  a run works, but look at it: slow, billed for what was deleted, clocks apart
  FAIL  a run would stop, or lose or mix up what it stores

Exit code 0 if nothing failed, 1 if something did, 2 if the URL is no store's.
What to do about a failure stands in its line. gs:// needs Google's default
credentials (`gcloud auth application-default login`) with the role Storage Object User
on the bucket, s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile; servers
other than theirs are named by TENSORSTORE_GCS_HTTP_URL with STORAGE_EMULATOR_HOST, and
by AWS_ENDPOINT_URL.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import statistics
import sys
import threading
import time
import uuid

from swe17.store import bucket, kv

_RACERS = 8
_SAMPLES = 10  # requests from which the latency is taken
_SLOW = 1.0  # MB/s below which deltas of a large model come late
_FAR = 1.0  # s of latency that is worth a look
_APART = 5.0  # s between two clocks
_ROOM = 1 << 30  # bytes free on the disk of file://


@dataclasses.dataclass(frozen=True)
class Line:
  """The outcome of one check."""

  name: str
  verdict: str  # PASS | WARN | FAIL
  text: str


class Preflight:
  """The checks of one store; what they made is removed by `clean_up`."""

  def __init__(self, store: kv.Store, size: int):
    self._store, self._size = store, size
    self._root = f'preflight/{uuid.uuid4().hex}/'

  def checks(self) -> dict[str, Callable[[], Line]]:
    """What is tried, in this order."""
    return {
      'create': self.create,
      'second create': self.second_create,
      'read': self.read,
      'ranged read': self.ranged_read,
      'absent key': self.absent,
      'list': self.listing,
      'overwrite': self.overwrite,
      'delete': self.delete,
      f'race of {_RACERS}': self.race,
      'latency': self.latency,
      'throughput': self.throughput,
    }

  def create(self) -> Line:
    data = os.urandom(1 << 10)
    started = time.perf_counter()
    made = self._store.create(self._key(), data)
    text = f'1 KiB created in {_ms(time.perf_counter() - started)}'
    return _line(made, text, 'a key that nobody else has was reported as taken')

  def second_create(self) -> Line:
    key = self._key()
    self._store.create(key, b'first')
    again = self._store.create(key, b'second')
    kept = self._store.read(key) == b'first'
    return _line(
      kept and not again,
      'a second create was refused and changed nothing',
      'a second create went through: two learners could publish one version, and '
      'groups could be replaced; this store does not enforce "create if absent"',
    )

  def read(self) -> Line:
    data = os.urandom(100_000)
    key = self._put(data)
    same = self._store.read(key) == data
    return _line(same, '100 kB came back as written', 'other bytes came back')

  def ranged_read(self) -> Line:
    data = os.urandom(100_000)
    key = self._put(data)
    spans = ((0, 10), (50_000, 60_000), (99_990, None), (99_990, 100_010), (7, 7))
    wrong = [(a, b) for a, b in spans if self._store.read(key, a, b) != data[a:b]]
    return _line(
      not wrong,
      f'{len(spans)} ranges came back exactly, past the end too',
      f'wrong bytes in the ranges {wrong}',
    )

  def absent(self) -> Line:
    found = self._store.read(self._key())
    return _line(found is None, 'reads as absent', 'a key that was never written reads')

  def listing(self) -> Line:
    keys = [self._put(b'') for _ in range(3)]
    seen = set(self._store.list(self._root))
    return _line(
      seen.issuperset(keys),
      'shows what has just been written',
      'lacks what has just been written: the learner would miss groups',
    )

  def overwrite(self) -> Line:
    key = self._put(b'old')
    self._store.write(key, b'new, and longer')
    found = self._store.read(key)
    return _line(
      found == b'new, and longer',
      'the new bytes are read at once',
      f'{found!r} is read after the new bytes were written',
    )

  def delete(self) -> Line:
    key = self._put(b'1')
    self._store.delete(key)
    self._store.delete(key)  # of an absent key: no error
    gone = self._store.read(key) is None and key not in self._store.list(self._root)
    return _line(gone, 'gone from reads and listings', 'it is still there')

  def race(self) -> Line:
    key, gate = self._key(), threading.Barrier(_RACERS)

    def racer(i: int) -> bool:
      gate.wait()
      return self._store.create(key, b'racer %d' % i)

    with concurrent.futures.ThreadPoolExecutor(_RACERS) as pool:
      wins = list(pool.map(racer, range(_RACERS)))
    if sum(wins) != 1:
      return Line('', 'FAIL', f'{sum(wins)} of {_RACERS} creators were told they won')
    mine = self._store.read(key) == b'racer %d' % wins.index(True)
    return _line(mine, 'exactly one won', "the winner's bytes are not the ones there")

  def latency(self) -> Line:
    key = self._put(os.urandom(1 << 10))
    reads = [_timed(lambda: self._store.read(key)) for _ in range(_SAMPLES)]
    creates = [
      _timed(lambda: self._store.create(self._key(), b'1')) for _ in range(_SAMPLES)
    ]
    text = ', '.join(
      f'{name} of 1 KiB: median {_ms(statistics.median(times))}, '
      f'slowest {_ms(max(times))}'
      for name, times in (('read', reads), ('create', creates))
    )
    far = statistics.median(reads + creates) > _FAR
    return Line('', 'WARN' if far else 'PASS', text)

  def throughput(self) -> Line:
    data, key = os.urandom(self._size), self._key()
    up = self._size / _timed(lambda: self._store.write(key, data)) / 1e6
    started = time.perf_counter()
    found = self._store.read(key)
    down = self._size / (time.perf_counter() - started) / 1e6
    if found != data:
      return Line('', 'FAIL', f'{self._size >> 20} MiB did not come back as written')
    text = f'{self._size >> 20} MiB: up {up:.1f} MB/s, down {down:.1f} MB/s'
    return Line('', 'WARN' if min(up, down) < _SLOW else 'PASS', text)

  def clean_up(self) -> Line:
    keys = self._store.list(self._root)
    for key in keys:
      self._store.delete(key)
    left = self._store.list(self._root)
    return _line(
      not left, f'{len(keys)} objects removed', f'{len(left)} are left in {self._root}'
    )

  def _key(self) -> str:
    return self._root + uuid.uuid4().hex

  def _put(self, data: bytes) -> str:
    key = self._key()
    self._store.write(key, data)
    return key


def run(url: str, *, deadline: float, size: int) -> Iterator[Line]:
  """Checks a store, one line at a time. ValueError if `url` is no store's."""
  started = time.perf_counter()
  try:
    store = kv.open(url, deadline=deadline)
  except kv.StoreError as e:
    yield Line('open', 'FAIL', e.reason)
    return
  yield Line('open', 'PASS', f'answered in {_ms(time.perf_counter() - started)}')
  flight = Preflight(store, size)
  checks = flight.checks()
  if url.startswith('file:'):
    folder = url.removeprefix('file://')
    checks['room'] = lambda: _room(folder)
    checks['clock'] = lambda: _file_clock(store, flight._key(), folder)
  else:
    checks['clock'] = lambda: _clock(bucket.skew(url))
  for name, check in checks.items():
    yield _checked(name, check)
  if url.startswith('gs:'):
    yield from _rules(url)
  yield _checked('clean-up', flight.clean_up)


def _checked(name: str, check: Callable[[], Line]) -> Line:
  try:
    return dataclasses.replace(check(), name=name)
  except kv.StoreError as e:
    return Line(name, 'FAIL', e.reason)


def _line(good: bool, yes: str, no: str) -> Line:
  return Line('', 'PASS' if good else 'FAIL', yes if good else no)


def _timed(call: Callable[[], object]) -> float:
  started = time.perf_counter()
  call()
  return time.perf_counter() - started


def _ms(seconds: float) -> str:
  return f'{1e3 * seconds:.1f} ms'


def _clock(ahead: float | None) -> Line:
  if ahead is None:
    return Line('', 'WARN', 'the server does not say its time')
  where = 'ahead of' if ahead > 0 else 'behind'
  text = f"this machine is {abs(ahead):.1f} s {where} the server's clock (to 0.5 s)"
  if abs(ahead) <= _APART:
    return Line('', 'PASS', text)
  return Line('', 'WARN', f'{text}: set it by NTP; requests are signed with the time')


def _file_clock(store: kv.Store, key: str, folder: str) -> Line:
  """The clock that stamps files, another machine's on a shared file system."""
  store.write(key, b'')
  return _clock(time.time() - (pathlib.Path(folder) / key).stat().st_mtime)


def _room(folder: str) -> Line:
  free = shutil.disk_usage(folder).free
  text = f'{free / 1e9:.1f} GB free on the disk'
  return Line('', 'PASS' if free >= _ROOM else 'WARN', text)


def _rules(url: str) -> Iterator[Line]:
  """What Google does to the bucket's objects by itself."""
  try:
    facts = bucket.facts(url)
  except kv.StoreError as e:
    yield Line('bucket rules', 'WARN', f'not looked at: {e.reason}')
    return
  prefix = kv.bucket_of(url)[2]
  found = bucket.threats(facts.rules, f'{prefix}/' if prefix else '')
  for deadly, text in found:
    yield Line('lifecycle', 'FAIL' if deadly else 'WARN', f'a rule {text}')
  if not found:
    text = f'none of {len(facts.rules)} rules takes objects of a run away'
    yield Line('lifecycle', 'PASS', text)
  if facts.retention:
    text = f'objects may not be deleted for {facts.retention} s: remove the policy'
    yield Line('retention', 'FAIL', text)
  kept = [f'soft delete of {facts.soft_delete / 86400:.1f} days'] * bool(
    facts.soft_delete
  ) + ['versioning'] * facts.versioning
  text = f'{" and ".join(kept)}: deleted deltas are kept, and billed, for that long'
  if kept:
    yield Line('versioning', 'WARN', text)
  else:
    yield Line('versioning', 'PASS', 'off: what is deleted is gone')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m launch.preflight',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    '--store',
    required=True,
    help='file:///absolute/folder, gs://bucket/prefix or s3://bucket/prefix',
  )
  parser.add_argument(
    '--deadline',
    type=float,
    default=kv.DEADLINE,
    help='how long an operation is tried again [s] (default: %(default)s)',
  )
  parser.add_argument(
    '--mib',
    type=int,
    default=8,
    help='size of the object that measures the throughput [MiB] (default: %(default)s)',
  )
  return parser


def main(argv: Sequence[str]) -> int:
  """Prints one line a check; the exit code."""
  args = _parser().parse_args(argv)
  if args.deadline <= 0 or args.mib < 1:
    said = f'got {args.deadline=} {args.mib=}, want > 0 s and >= 1 MiB'
    print(f'preflight: {said}', file=sys.stderr)
    return 2
  lines = []
  try:
    if args.store == 'memory://':
      raise ValueError('store: memory:// is private to one process: no run can use it')
    for line in run(args.store, deadline=args.deadline, size=args.mib << 20):
      lines.append(line)
      print(f'{line.verdict}  {line.name:<14} {line.text}', flush=True)
  except ValueError as e:
    print(f'preflight: {e}', file=sys.stderr)
    return 2
  failed = sum(line.verdict == 'FAIL' for line in lines)
  warned = sum(line.verdict == 'WARN' for line in lines)
  said = 'a run can use this store' if not failed else 'a run cannot use this store'
  print(f'{said}: {len(lines)} checks, {warned} warnings, {failed} failed')
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
