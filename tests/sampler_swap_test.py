"""From the store to the tokens: what a sampler draws after a version is another's.

CASES 4.11. The declared rule: a session in flight goes on over its cache, tokens from
the swap on are of the new version; a session that begins after it draws as a sampler
that never knew other weights.
"""

import dataclasses
import functools
import threading
import time

import jax
import numpy as np
import pytest

from swe17 import config, types
from swe17.metrics import records
from swe17.model import params as p
from swe17.sampler import decode, engine
from swe17.sampler import weights as following
from swe17.store import kv
from swe17.sync import apply, codec, publisher

MODEL = config.Model(
  layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, rotary_dim=8
)
V, LENGTH, WAIT = 97, 128, 60.0
SAMPLER = config.Sampler(
  slots=4, decode_steps=4, prefill_rows=2, prefill_chunk=8, top_k=32, poll_seconds=0.01
)


@pytest.fixture(scope='module', autouse=True)
def compiled_once():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decode, 'jitted', functools.cache(decode.jitted))
    yield


@functools.cache
def weights(seed: int) -> p.Params:
  """Version `seed`: weights that have nothing in common with any other's."""
  return p.rounded(p.init(p.abstract(MODEL, V), jax.random.key(seed)))


@dataclasses.dataclass
class Sampler:
  """A sampler of one run, without its HTTP."""

  weights: following.Weights
  engine: engine.Engine
  events: str

  def close(self) -> None:
    self.weights.close()
    self.engine.close()


@pytest.fixture
def start(tmp_path):
  """Starts samplers on the store of one run."""
  made = []

  def one(**sync) -> Sampler:
    cfg = config.Config(
      run_dir=str(tmp_path),
      store=f'file://{tmp_path}/store',
      sampler=SAMPLER,
      sync=config.Sync(**sync),
    )
    path = str(tmp_path / f'sampler-{len(made)}.jsonl')
    held = following.Weights(cfg, records.EventLog(path), len(made))
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32'), p.abstract(MODEL, V)
    )
    version = held.first(shapes, threading.Event())
    serving = engine.Engine(
      held.params, version, model=MODEL, cfg=SAMPLER, length=LENGTH, swap=held.swap
    )
    serving.start()
    made.append(Sampler(held, serving, path))
    return made[-1]

  yield one
  for sampler in made:
    sampler.close()


@pytest.fixture
def publish(tmp_path):
  pub = publisher.Publisher(
    kv.open(f'file://{tmp_path}/store'), config.Sync(), attempt='a'
  )

  def one(version: int) -> str:
    host = apply.to_host(weights(version))
    return pub.publish(version, host, step=version, plan={}).digest

  return one


def ask(session: str, **changes) -> types.GenerateRequest:
  prefix = np.random.default_rng(0).integers(0, V, 40).astype(np.int32)
  values = {
    'token_T': prefix,
    'max_new': 12,
    'stop_ids': (),
    'sampling': SAMPLER.sampling,
    'key': (1, 2),
  }
  return types.GenerateRequest(session=session, **{**values, **changes})


def draw(sampler: Sampler, *args, **changes) -> types.GenerateResult:
  return sampler.engine.submit(ask(*args, **changes)).result(WAIT)


def wait_for(path: str, versions: int) -> list[dict]:
  """The 'weights' events of a sampler, once there are as many as that."""
  until = time.monotonic() + WAIT
  while time.monotonic() < until:
    found = [e for e in records.read_events(path) if e['kind'] == 'weights']
    if len(found) >= versions:
      return found
    time.sleep(0.01)
  raise AssertionError(f'{versions} versions were not reported')


def test_the_same_prefix_after_a_publish_draws_as_a_cold_sampler_does(start, publish):
  publish(0)
  warm = start()
  old = draw(warm, 'a')
  again = draw(warm, 'b')
  np.testing.assert_array_equal(old.token_T, again.token_T)
  publish(1)
  new = draw(warm, 'c', min_version=1)  # the 40 tokens that 'a' and 'b' hold cached
  cold = draw(start(), 'x')
  assert (old.version_T == 0).all() and (new.version_T == 1).all()
  np.testing.assert_array_equal(new.token_T, cold.token_T)
  # Weights that came through the store stand on their device for good, unlike arrays
  # that merely happen to: no program may be compiled again for them.
  assert warm.engine.counters()['compilations'] == 0
  np.testing.assert_allclose(new.logp_T, cold.logp_T, atol=1e-5)
  assert old.token_T.tolist() != new.token_T.tolist()
  # Also by a name that was used before, for the same prompt: an evaluation run again.
  renamed = draw(warm, 'a', min_version=1)
  np.testing.assert_array_equal(renamed.token_T, cold.token_T)


def test_the_next_turn_of_a_session_in_flight_keeps_its_cache_over_a_swap(
  start, publish
):
  publish(0)
  sampler = start()
  first = draw(sampler, 'a')
  publish(1)
  glue = np.arange(5, dtype=np.int32)
  token_T = np.concatenate([ask('a').token_T, first.token_T, glue])
  fed = []
  real = sampler.engine._device.prefill_program

  def prefill(params, cache, token_BT, position_BT, table_BJ):
    fed.append(int((position_BT < LENGTH).sum()))
    return real(params, cache, token_BT, position_BT, table_BJ)

  sampler.engine._device.prefill_program = prefill
  kept = draw(sampler, 'a', token_T=token_T, min_version=1)
  assert sum(fed) == glue.size  # the last drawn token and all but one of the glue
  assert (kept.version_T == 1).all()
  anew = draw(sampler, 'other', token_T=token_T)
  assert not np.allclose(kept.logp_T, anew.logp_T, atol=1e-3)  # the cache is of both


@pytest.mark.parametrize('verify', ['digest', 'checksum'])
def test_every_version_a_sampler_holds_is_reported_with_its_digest(
  start, publish, verify: str
):
  want = [publish(0)]
  sampler = start(verify_device=verify)
  for version in range(1, 4):
    want.append(publish(version))
    wait_for(sampler.events, version + 1)
  found = wait_for(sampler.events, 4)
  assert [e['version'] for e in found] == [0, 1, 2, 3]
  assert [e['published'] for e in found] == want
  held = want if verify == 'digest' else [None] * 4
  assert [e['digest'] for e in found] == held
  assert all(e['pause_seconds'] > 0 for e in found[1:])
  assert apply.device_digest(sampler.weights.params, 4 << 20) == want[-1]


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_device_whose_digest_is_wrong_after_all_ends_the_sampler(
  start, publish, monkeypatch
):
  """Its sums were right; the pulled digest, taken off the engine's thread, is not."""
  publish(0)
  sampler = start()
  monkeypatch.setattr(apply, 'device_digest', lambda *_: 'f' * 32)
  publish(1)
  with pytest.raises(ConnectionError):
    sampler.engine.submit(ask('a', min_version=9)).result(WAIT)
  assert isinstance(sampler.engine.error, RuntimeError)
  assert 'not serving these weights' in str(sampler.engine.error.__cause__)


def test_no_version_is_applied_while_the_one_before_is_being_verified(
  start, publish, monkeypatch
):
  """Its buffers would be donated under the hands of who hashes them."""
  publish(0)
  sampler = start()
  real, gate, began = apply.device_digest, threading.Event(), []

  def slow(params, block_bytes):
    began.append(sampler.engine.version)
    assert gate.wait(WAIT)
    return real(params, block_bytes)

  monkeypatch.setattr(apply, 'device_digest', slow)
  publish(1)
  draw(sampler, 'a', min_version=1)  # it serves while the digest is taken
  publish(2)
  for _ in range(5):
    assert (draw(sampler, 'a').version_T == 1).all()
  gate.set()
  assert (draw(sampler, 'b', min_version=2).version_T == 2).all()
  found = wait_for(sampler.events, 3)
  assert all(e['digest'] == e['published'] for e in found)


def test_acknowledgement_is_there_while_it_serves_and_taken_back_at_the_end(
  start, publish, tmp_path
):
  publish(0)
  sampler = start()
  store = kv.open(f'file://{tmp_path}/store')
  (key,) = store.list('weights/ack/')
  assert key.startswith('weights/ack/sampler-0-')
  sampler.close()
  sampler.weights._thread.join(WAIT)
  assert store.list('weights/ack/') == []


def test_published_bytes_are_the_rounded_weights_that_the_sampler_computes_with():
  host = apply.to_host(weights(1))
  held = apply.from_host(host, weights(0))
  assert codec.digest(apply.to_host(held), 64) == codec.digest(host, 64)
  for name, leaf in apply.name_tree(weights(1)).items():
    np.testing.assert_array_equal(apply.name_tree(held)[name], leaf)
