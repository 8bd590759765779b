"""A sampler's weights: from the store, beside the serving, verified on the device.

A thread follows the weight manifests and stages new versions in host memory; the engine
applies them in place between two dispatches, and checks every block by a sum on the
device before it serves them. With `sync.verify_device=digest` the thread then pulls all
bytes back and hashes them, while the engine decodes; no further version is applied
until that is done.
"""

import threading
import time
import uuid

from swe17 import config
from swe17.metrics import records
from swe17.model import params as p
from swe17.store import kv
from swe17.sync import apply, follower, relay


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

  def pending(self) -> bool:
    """Whether `swap` has something to give, or to say."""
    return self._staged is not None or self._error is not None

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
