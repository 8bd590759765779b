"""A sampler's process: weights from the store, tokens over HTTP, nothing else.

It never talks to the learner. Its address is registered in the store under samplers/,
where routers look; what it serves there is in http.py, which weights in weights.py.
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
from typing import Any, Protocol

from aiohttp import web
import jax

from swe17 import config
from swe17.agent import formats
from swe17.metrics import records, status
from swe17.model import params as p
from swe17.sampler import engine, http, weights
from swe17.store import kv

_log = logging.getLogger(__name__)
_PATIENCE = 600.0  # seconds until a store that does not answer is an error
_PAUSE = 1.0  # seconds between tries


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
  followed = weights.Weights(cfg, events, index)
  fmt = formats.load(cfg.model.source)
  abstract = p.abstract(cfg.model, fmt.vocab_size)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, 'float32'), abstract)
  version = followed.first(shapes, stopped)
  if version is None:
    return 0
  serving = engine.Engine(
    followed.params,
    version,
    model=cfg.model,
    cfg=cfg.sampler,
    length=cfg.agent.max_context,
    swap=followed.swap,
    pending=followed.pending,
  )
  says.set('compiling')
  serving.start()
  try:
    chat = http.Direct(serving, fmt, cfg.sampler, cfg.agent.max_context, _names(cfg))
    asyncio.run(_serve(serving, cfg, index, stopped, says, chat))
  finally:
    followed.close()
    serving.close()
  return 0 if serving.error is None else 1


async def _serve(
  serving: engine.Engine,
  cfg: config.Config,
  index: int,
  stopped: threading.Event,
  says: status.Status,
  chat: http.Direct | None = None,
) -> None:
  runner = web.AppRunner(http.app(serving, chat), access_log=None)
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
  serving.drain()
  await registered
  try:
    await asyncio.to_thread(store.delete, _key(index))
  except kv.StoreError as e:  # routers find out by themselves
    _log.warning('the registration stays: %s', e)
  await finish(serving, cfg.sampler.drain_seconds)
  # Requests still open are answered (503) before the connections close.
  await asyncio.to_thread(serving.close)
  await runner.cleanup()


class Draining(Protocol):
  """An engine that takes no more."""

  error: BaseException | None

  def drain(self) -> None: ...

  @property
  def busy(self) -> int: ...


async def finish(serving: Draining, seconds: float) -> None:
  """Waits until the requests of a drained engine have ended, `seconds` at most."""
  until = time.monotonic() + seconds
  while serving.busy and serving.error is None and time.monotonic() < until:
    await asyncio.sleep(0.05)


def _names(cfg: config.Config) -> tuple[str, ...]:
  """What clients of the OpenAI routes may call the model."""
  return ('swe17', cfg.model.source) if cfg.model.source else ('swe17',)


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
