"""Publisher and follower under faults: at every operation, and killed at each."""

import dataclasses

import numpy as np
import pytest

from swe17.store import faults, kv
from swe17.sync import follower, manifest, publisher
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store


# Faults that differ for each operation: `full` is `drop_before`, a lost reply to a read
# is a lost request, and an object that was created once has no older bytes to splice.
_DISTINCT = {
  'read': ('drop_before', 'truncate', 'flip', 'stale'),
  'write': ('drop_before', 'drop_after', 'truncate', 'flip'),
  'create': ('drop_before', 'drop_after', 'truncate', 'flip'),
  'list': ('drop_before', 'stale'),
  'delete': ('drop_before', 'drop_after'),
}
_KILL_CFG = dataclasses.replace(world.CFG, full_every=2, object_bytes=100)


def _next_version(store: faults.FaultStore) -> int:
  newest = publisher.latest(store.beside())
  return 0 if newest is None else newest + 1


def _run(
  client: faults.FaultStore, reader: faults.FaultStore, versions: int = 12
) -> world.Record:
  """Publishes `versions` versions; the reader polls after each, and at the end."""
  pub, record = world.publisher(client), world.Record(follower.Follower(reader))
  for version in range(versions):
    # One tensor that changes, in two blocks, and one that does not: runs are many.
    tensors = {name: world.weights(version)[name] for name in ('layer/w', 'scale')}
    record.add(version, tensors)
    pub.publish(version, tensors, step=version, plan={})
    record.poll()
  record.settle(versions - 1)
  return record


@pytest.mark.parametrize('side', ['publisher', 'follower'])
def test_every_fault_at_every_operation_of_a_run(side: str):
  clean = faults.FaultStore(kv.open('memory://'))
  reader = clean.beside()
  assert _run(clean, reader).follow.faults.total() == 0
  asked = [o.kind for o, _ in (clean if side == 'publisher' else reader).log]
  want = {'read', 'list'} if side == 'follower' else set(_DISTINCT)
  assert set(asked) == want
  for index, operation in enumerate(asked):
    for kind in _DISTINCT[operation]:
      bad = faults.at({index: faults.Fault(kind)})
      client = faults.FaultStore(kv.open('memory://'))
      reader = client.beside()
      (client if side == 'publisher' else reader).rule = bad
      # One fault is nothing to a publisher: no call fails, every version comes out,
      # and the follower, at most some polls later, holds the last one.
      _run(client, reader)


@pytest.mark.parametrize('seed', range(6))
def test_storm_of_faults_on_both_sides(seed: int):
  client = faults.FaultStore(kv.open('memory://'), faults.seeded(seed, 0.25))
  reader = client.beside(faults.seeded(seed + 100, 0.25))
  record = world.Record(follower.Follower(reader))
  attempt, version = 0, 0
  pub = world.publisher(client, 'a0')
  while version < 14:
    if version == 10:
      client.rule = reader.rule = faults.never
    record.add(version)
    try:
      world.publish(pub, version)
      version += 1
    except kv.StoreError:
      pass  # the learner calls again
    except (publisher.PublishConflict, ValueError):
      # What it can't make sense of stops the learner; the next one goes on.
      attempt += 1
      pub = world.publisher(client, f'a{attempt}')
      version = _next_version(client)
    record.poll()
  record.settle(13)


def _killed_run(point: int, after: bool, restore: bool) -> str:
  """Kills a publisher at its `point`-th change of the store; another takes over.

  A reader polls at every operation of both, and others join at the kill and at the end.
  Returns what was changed there; '' if there was no such point.
  """
  store = faults.FaultStore(kv.open('memory://'))
  record = world.Record(follower.Follower(store.beside()))
  changes, at = 0, ''

  def rule(operation: faults.Operation) -> faults.Fault | None:
    nonlocal changes, at
    record.poll()
    if operation.kind not in ('write', 'create', 'delete'):
      return None
    changes, at = changes + 1, f'{operation.kind} {operation.key}'
    if changes != point + 1:
      return None
    if after:
      return faults.Fault('drop_after', error=world.Killed())
    raise world.Killed

  def run(pub: publisher.Publisher, versions: range, scale: float) -> None:
    for version in versions:
      tensors = {**world.weights(version), 'scale': np.array(scale, world.BF16)}
      record.add(version, tensors)
      pub.publish(version, tensors, step=version, plan={})
      record.poll()

  store.rule = rule
  try:
    run(world.publisher(store, 'a', _KILL_CFG), range(7), 2.0)
    return ''
  except world.Killed:
    killed = at
  _join(store.beside(), record)
  first = _next_version(store)
  successor = world.publisher(store, 'b', _KILL_CFG)
  if restore and first > 0:
    assert successor.restore(60) == first - 1
  run(successor, range(first, first + 4), 3.0)
  record.settle(first + 3)
  assert not set(record.follow.faults) - {'missing', 'gap'}
  _join(store.beside(), record)
  return killed


def _join(store: kv.Store, record: world.Record) -> None:
  """A follower that holds nothing gets a version on record, if there is any."""
  late = world.Record(follower.Follower(store))
  late.digests = record.digests
  assert late.poll() is not None or publisher.latest(store) is None


@pytest.mark.parametrize('restore', [False, True])
@pytest.mark.parametrize('after', [False, True])
def test_publisher_killed_at_each_change_leaves_only_whole_versions(
  after: bool, restore: bool
):
  """CASES 4.8: every boundary of every write, creation and deletion."""
  points: list[str] = []
  while point := _killed_run(len(points), after, restore):
    points.append(point)
  assert len(points) > 30
  for kind in (
    'write weights/data/',
    'write weights/full/',
    'create weights/manifest/',
  ):
    assert sum(point.startswith(kind) for point in points) > 1
  for prefix in (manifest.MANIFESTS, manifest.FULLS, manifest.DATA):
    assert any(point.startswith(f'delete {prefix}') for point in points)
