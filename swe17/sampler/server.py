"""A sampler's process: weights from the store, tokens over HTTP, nothing else.

  POST /generate   a wire request in, a wire result out (token in, token out)
  GET  /health     {"version", "busy", "sampled"}

It never talks to the learner. A thread follows the weight manifests and stages new
versions in host memory; the engine applies them in place between two dispatches, and
checks every block by a sum on the device before it serves them. With
`sync.verify_device=digest` the thread then pulls all bytes back and hashes them, while
the engine decodes; no further version is applied until that is done. Its address is
registered in the store under samplers/, where routers look.
"""

import asyncio
from collections.abc import Callable
import json
import logging
import os
import signal
import socket
import threading
import time
from typing import Any
import uuid

from aiohttp import web
import jax

from swe17 import config, wire
from swe17.agent import formats
from swe17.metrics import records, status
from swe17.model import params as p
from swe17.sampler import engine
from swe17.store import kv
from swe17.sync import apply, follower, relay

_log = logging.getLogger(__name__)
_MAX_BODY = 8 << 20  # bytes of a request
_PATIENCE = 600.0  # seconds until a store that does not answer is an error
_PAUSE = 1.0  # seconds between tries


class Weights:
  """Follows the store on a thread; hands verified versions to the engine."""

  def __init__(self, cfg: config.Config, events: records.EventLog, index: int = 0):
    # Behind a relay the controller acknowledges for its whole cluster.
    own = '' if cfg.relay.enabled else f'sampler-{index}-{uuid.uuid4().hex[:12]}'
    self._follower = follower.Follower(
      relay.for_sampler(cfg, kv.open(cfg.store), index),
      threads=cfg.sync.threads,
      ack=own,
      ack_seconds=cfg.sync.ack_seconds,
    )
    self._events, self._poll = events, cfg.sampler.poll_seconds
    self._pull = cfg.sync.verify_device == 'digest'
    self._staged: follower.Staged | None = None
    self._pause = 0.0  # seconds that the last swap took
    self._taken, self._stop = threading.Event(), threading.Event()
    self._params: p.Params | None = None
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._follow, name='follow', daemon=True)

  def first(self, shapes: p.Params, stopped: threading.Event) -> int | None:
    """Waits for the first version and puts it on the device. Its number, or None."""
    while not stopped.is_set():
      staged = self._follower.poll()
      if staged is not None:
        # Compiles what swaps run, and checks what the device holds.
        self._params = apply.warm(apply.from_host(staged.tensors, shapes), staged)
        self._follower.commit(staged)
        self._report(staged)
        self._thread.start()
        return staged.version
      stopped.wait(self._poll)
    return None

  @property
  def params(self) -> p.Params:
    assert self._params is not None, 'no version yet'
    return self._params

  def swap(self) -> tuple[p.Params, int] | None:
    """Applies a staged version in place, if there is one. Engine thread only.

    RuntimeError once nobody follows the store: the engine must not serve old weights.
    """
    if self._error is not None:
      raise RuntimeError('no newer weights can arrive') from self._error
    staged = self._staged
    if staged is None or self._params is None:
      return None
    began = time.monotonic()
    self._params = apply.apply(self._params, staged)
    self._follower.commit(staged)
    self._pause = time.monotonic() - began
    self._staged = None
    self._taken.set()
    return self._params, staged.version

  def close(self) -> None:
    self._stop.set()
    self._taken.set()

  def _follow(self) -> None:
    try:
      self._stage()
    except BaseException as e:
      self._error = e
      raise

  def _stage(self) -> None:
    while not self._stop.is_set():
      self._taken.clear()
      staged = self._staged = self._follower.poll()
      if staged is None:
        self._stop.wait(self._poll)
        continue
      self._taken.wait()
      if not self._stop.is_set():
        # Nothing is staged now, so the engine keeps these buffers as they are.
        self._report(staged)
    self._follower.close()

  def _report(self, staged: follower.Staged) -> None:
    """Says which bytes the device holds.

    Their sums were checked when they were applied; the digest, if it is asked for, is
    of all of them, pulled back.
    """
    block_bytes, digest = staged.manifest.block_bytes, None
    if self._pull:
      digest = apply.device_digest(self._params, block_bytes)
    self._events.write(
      'weights',
      version=staged.version,
      digest=digest,
      published=staged.manifest.digest,
      bytes=staged.bytes,
      pause_seconds=self._pause,
      faults=dict(self._follower.faults),
    )
    if digest is not None and digest != staged.manifest.digest:
      raise RuntimeError(
        f'version {staged.version}: the device holds {digest}, '
        f'published was {staged.manifest.digest}; not serving these weights'
      )


def run(cfg: config.Config, index: int) -> int:
  """Runs sampler `index` until SIGTERM. Exit code 0, or 1 if the engine failed."""
  stopped = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stopped.set())
  says = status.Status(cfg.run_dir, f'sampler-{index}')
  events = records.EventLog(os.path.join(cfg.run_dir, f'sampler-{index}.jsonl'))
  says.set('waiting', 'for weights')
  # An earlier process's address.
  _insist(lambda: kv.open(cfg.store).delete(_key(index)), stopped)
  if stopped.is_set():
    return 0
  weights = Weights(cfg, events, index)
  vocab = formats.load(cfg.model.source).vocab_size
  abstract = p.abstract(cfg.model, vocab)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, 'float32'), abstract)
  version = weights.first(shapes, stopped)
  if version is None:
    return 0
  serving = engine.Engine(
    weights.params,
    version,
    model=cfg.model,
    cfg=cfg.sampler,
    length=cfg.agent.max_context,
    swap=weights.swap,
  )
  says.set('compiling')
  serving.start()
  try:
    asyncio.run(_serve(serving, cfg, index, stopped, says))
  finally:
    weights.close()
    serving.close()
  return 0 if serving.error is None else 1


async def _serve(
  serving: engine.Engine,
  cfg: config.Config,
  index: int,
  stopped: threading.Event,
  says: status.Status,
) -> None:
  runner = web.AppRunner(app(serving), access_log=None)
  await runner.setup()
  site = web.TCPSite(runner, cfg.sampler.host, 0)
  await site.start()
  where = {
    'url': _url(cfg.sampler, runner.addresses[0]),
    'pid': os.getpid(),
    'slots': cfg.sampler.slots,
    'region': index % cfg.regions,
  }
  store = kv.open(cfg.store)
  data = json.dumps(where).encode()
  # Beside the serving: the line to the store may be cut just now.
  registered = asyncio.ensure_future(
    asyncio.to_thread(_insist, lambda: store.write(_key(index), data), stopped)
  )
  while not stopped.is_set() and serving.error is None:
    says.set('serving', f'version {serving.version}, {serving.busy} busy')
    await asyncio.sleep(0.1)
    if registered.done():
      registered.result()
  stopped.set()
  await registered
  try:
    await asyncio.to_thread(store.delete, _key(index))
  except kv.StoreError as e:  # routers find out by themselves
    _log.warning('the registration stays: %s', e)
  # Open requests are answered (503) before the connections close.
  await asyncio.to_thread(serving.close)
  await runner.cleanup()


def _insist(call: Callable[[], None], stopped: threading.Event) -> None:
  """Makes a call to the store until it is answered, or until it is time to stop.

  StoreError after `_PATIENCE` seconds, and at once where waiting is no help.
  """
  until = time.monotonic() + _PATIENCE
  while not stopped.is_set():
    try:
      call()
      return
    except kv.StoreError as e:
      if not e.transient or time.monotonic() > until:
        raise
      _log.warning('asking again in %g s: %s', _PAUSE, e)
    stopped.wait(_PAUSE)


def _url(cfg: config.Sampler, bound: tuple[Any, ...]) -> str:
  """Where routers reach a server that is bound to (address, port, ...)."""
  everywhere = bound[0] in ('0.0.0.0', '::')
  host = cfg.address or (socket.getfqdn() if everywhere else bound[0])
  return f'http://[{host}]:{bound[1]}' if ':' in host else f'http://{host}:{bound[1]}'


def _key(index: int) -> str:
  return f'samplers/{index}.json'


def app(serving: engine.Engine) -> web.Application:
  """The HTTP interface of an engine."""

  async def generate(request: web.Request) -> web.Response:
    body = await request.read()
    try:
      job = serving.submit(wire.bytes_to_request(body))
      result = await asyncio.wrap_future(job)
    except ValueError as e:
      return web.json_response({'error': str(e)}, status=400)
    except ConnectionError as e:
      return web.json_response({'error': str(e)}, status=503)
    return web.Response(
      body=wire.result_to_bytes(result), content_type='application/octet-stream'
    )

  async def health(_: web.Request) -> web.Response:
    values: dict[str, Any] = {
      'version': serving.version,
      'busy': serving.busy,
      'sampled': serving.sampled,
    }
    return web.json_response(values)

  server = web.Application(client_max_size=_MAX_BODY)
  server.add_routes([web.post('/generate', generate), web.get('/health', health)])
  return server
