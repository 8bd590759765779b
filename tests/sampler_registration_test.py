"""How a sampler makes itself known: where it can be reached, and through a cut line."""

import asyncio
import json
import threading

import pytest

from swe17 import config
from swe17.metrics import status
from swe17.sampler import server
from swe17.store import faults, kv


class Engine:
  """Serves nothing; enough of an engine to be registered."""

  error, version, busy, sampled = None, 3, 0, 0
  drained = closed = False

  def drain(self) -> None:
    assert not self.closed
    self.drained = True

  def close(self) -> None:
    self.closed = True


@pytest.mark.parametrize(
  ('bound', 'address', 'url'),
  [
    (('127.0.0.1', 81), '', 'http://127.0.0.1:81'),
    (('127.0.0.1', 81), 'node-3', 'http://node-3:81'),
    (('0.0.0.0', 81), '10.1.2.3', 'http://10.1.2.3:81'),
    (('::1', 81, 0, 0), '', 'http://[::1]:81'),
  ],
)
def test_what_is_registered_is_what_routers_can_reach(bound, address, url):
  assert server._url(config.Sampler(address=address), bound) == url


def test_a_sampler_that_listens_everywhere_names_its_machine(monkeypatch):
  monkeypatch.setattr(server.socket, 'getfqdn', lambda: 'node-7.cluster')
  cfg = config.Sampler(host='0.0.0.0')
  assert server._url(cfg, ('0.0.0.0', 81)) == 'http://node-7.cluster:81'


async def test_a_cut_line_delays_the_registration_and_ends_nothing(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(server, '_PAUSE', 0.01)
  inner = kv.open(f'file://{tmp_path}/store')
  away = kv.StoreError(inner.url, '', 'no answer', transient=True)
  cut = [True]

  def rule(_: faults.Operation) -> faults.Fault | None:
    return faults.Fault('drop_before', error=away) if cut else None

  store = faults.FaultStore(inner, rule)
  monkeypatch.setattr(server.kv, 'open', lambda url: store)
  cfg = config.Config(
    store=f'file://{tmp_path}/store',
    regions=3,
    sampler=config.Sampler(processes=5, slots=7),
    rollout=config.Rollout(processes=3),
  )
  stopped, engine = threading.Event(), Engine()
  says = status.Status(str(tmp_path), 'sampler-4')
  serving = asyncio.ensure_future(server._serve(engine, cfg, 4, stopped, says))
  while len(store.log) < 3:
    await asyncio.sleep(0.01)
  assert not serving.done()
  assert 'serving' in (tmp_path / 'status' / 'sampler-4.json').read_text()
  cut.clear()
  while not inner.list('samplers/'):
    await asyncio.sleep(0.01)
  entry = json.loads(inner.read('samplers/4.json'))
  assert (entry['region'], entry['slots']) == (1, 7)
  cut.append(True)
  stopped.set()
  await asyncio.wait_for(serving, 60)  # and a cut does not keep it from ending
  assert engine.drained and engine.closed
  assert inner.list('samplers/') == ['samplers/4.json']


def test_a_store_that_refuses_is_not_asked_for_ever(tmp_path):
  store = faults.FaultStore(
    kv.open(f'file://{tmp_path}'), lambda _: faults.Fault('full')
  )
  with pytest.raises(kv.StoreError, match='the disk is full'):
    server._insist(lambda: store.write('samplers/0.json', b'{}'), threading.Event())
  assert len(store.log) == 1
