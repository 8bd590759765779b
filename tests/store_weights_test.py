"""Weights through real buckets over a bad line: what is held is what was published."""

import random

import pytest

from launch import emulator
from swe17.store import kv
from swe17.sync import follower
from tests import servers
from tests import sync_world as world

_FAULTS = ('429', '503', 'drop_before', 'drop_after', 'cut')


@pytest.mark.parametrize('kind', ['gs', 's3'])
def test_a_follower_over_a_bad_line_holds_what_was_published(kind: str):
  rng = random.Random(kind)
  with (
    emulator.gcs() if kind == 'gs' else emulator.s3() as server,
    servers.line(server) as line,
  ):
    pub = world.publisher(line.open())
    record = world.Record(follower.Follower(line.open()))
    met = 0

    def spoil(method: str, path: str) -> None:
      nonlocal met
      if rng.random() < 0.2:
        line.faults, met = [rng.choice(_FAULTS)], met + 1

    line.before = spoil
    for version in range(6):
      record.add(version)
      world.publish(pub, version)  # no fault of the line reaches the learner
      record.settle(version)
    assert met > 10
    assert not record.follow.faults  # nor the follower


def test_of_two_learners_on_one_bucket_one_publishes():
  with servers.gcs() as (_, url):
    stores = [kv.open(f'{url}/run') for _ in range(2)]
    pubs = [
      world.publisher(store, name) for store, name in zip(stores, 'ab', strict=True)
    ]
    world.publish(pubs[0], 0)
    with pytest.raises(world.publishing.PublishConflict):
      pubs[1].publish(0, world.weights(3), step=0, plan={})
