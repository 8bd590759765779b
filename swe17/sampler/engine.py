"""The engine: requests in, drawn tokens out, on one thread that owns the device.

Continuous batching over KV pages: a cycle swaps weights if there are new ones, starts
waiting requests (scheduler.py), prefills pieces of contexts up to a budget, and decodes
some steps for all that are ready. Contexts share pages: a group's prompt is prefilled
once, and a session's next turn computes its new tokens only (pages.py).

Weights are swapped between two dispatches. By default contexts keep their KV entries
(`sampler.on_swap`), and every token records the version that drew it.

Routes (model.moe.replay) are part of the cache: row i says through which experts the
token at position i was fed when its entry was made. So they are those that later draws
attended to: they stay over a swap, and a context that is prefilled anew has new ones,
which the answer carries in place of the caller's.
"""

from collections.abc import Callable
import concurrent.futures
import queue
import threading
import time

from swe17 import config, types
from swe17.model import params as p
from swe17.sampler import check, compiles, device, pages, scheduler
from swe17.sampler import job as jobs


class Full(Exception):
  """As many requests wait as may; ask again in `retry_after_s` seconds."""

  def __init__(self, retry_after_s: float):
    super().__init__(f'the queue is full, ask again in {retry_after_s:.0f} s')
    self.retry_after_s = retry_after_s


class Engine:
  """Serves requests until closed. Owns its cache, and the weights it is given."""

  def __init__(
    self,
    params: p.Params,
    version: int,
    *,
    model: config.Model,
    cfg: config.Sampler,
    length: int,
    swap: Callable[[], tuple[p.Params, int] | None],
    pending: Callable[[], bool] | None = None,
  ):
    """Args:
    params: values to compute with, already rounded.
    version: their version.
    model: shape.
    cfg: slots, pages, filters, chunk sizes.
    length: positions of the longest context.
    swap: called between dispatches; returns new params and version, or None.
    pending: whether `swap` has something; `sampler.on_swap=drain` needs it.
    """
    self.version = version
    self.sampled = 0
    self._prefilled = self._swaps = self._compiled = 0
    self._seconds = 1.0  # that a request takes, the last ones weighing most
    self._cfg, self._length = cfg, length
    self._swap, self._pending = swap, pending
    self._vocab = params.embed_VD.shape[0]
    K = cfg.top_k if cfg.sampling.truncates else 0
    if cfg.sampling.truncates and K == 0:
      raise ValueError(
        f'sampler.top_k=0 with top_p={cfg.top_p}, min_p={cfg.min_p}: top_k bounds '
        'the recorded set; set it (64 is usual)'
      )
    if cfg.on_swap == 'drain' and pending is None:
      raise ValueError(
        'sampler.on_swap=drain: got no `pending`, want one that says when to drain'
      )
    columns = -(-length // cfg.page)
    count = cfg.kv_pages or cfg.slots * columns
    self._pool = pages.Pool(count, cfg.page)
    self._scheduler = scheduler.Scheduler(cfg.slots, self._pool, steps=cfg.decode_steps)
    self._device = device.Device(params, model, cfg, length=length, pages=count, K=K)
    self._inbox: queue.SimpleQueue[jobs.Job] = queue.SimpleQueue()
    self._wake, self._stop = threading.Event(), threading.Event()
    self._door = threading.Lock()  # nobody comes in after the last was sent home
    self._closed = self._draining = False
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Compiles all programs, then starts serving."""
    self._device.warm_up()
    self._thread.start()

  def drain(self) -> None:
    """Takes no new request from now on; those that are here go on."""
    with self._door:
      self._draining = True

  @property
  def stopping(self) -> bool:
    """Whether new requests are sent away for good."""
    return self._draining or self._closed or self._stop.is_set()

  def close(self) -> None:
    """Stops the thread; open requests fail with ConnectionError."""
    self._stop.set()
    self._wake.set()
    if self._thread.is_alive():
      self._thread.join(timeout=10)
    else:
      self._fail_all()

  def submit(
    self, request: types.GenerateRequest, on_part: jobs.OnPart | None = None
  ) -> concurrent.futures.Future:
    """Queues a request. Its future gives a GenerateResult or raises ValueError.

    Cancelling the future ends the request at any time: see `cancel`.

    Args:
      request: what is asked.
      on_part: called on the engine's thread with the tokens of each dispatch, `finish`
        '' until the last; `types.join` of all is the future's result. It must be quick
        and must not raise.

    Raises:
      ValueError: the request can never be served, with the field that is wrong.
      Full: too many wait already.
      ConnectionError: the engine is stopping or has failed.
    """
    most = min(self._length, len(self._pool.all) * self._pool.size)
    check.request(request, self._cfg, length=most, vocab=self._vocab)
    future: concurrent.futures.Future = concurrent.futures.Future()
    with self._door:
      if self.stopping:
        raise ConnectionError(f'the sampler is stopping ({self.error!r})')
      if not self.room():
        raise Full(min(max(self._seconds, 1.0), 60.0))
      self._inbox.put(jobs.Job(request, future, on_part))
    self._wake.set()
    return future

  def cancel(self, future: concurrent.futures.Future) -> bool:
    """Gives up a request, waiting or running; False when it had ended before.

    A slot that it holds is free before the next dispatch.
    """
    given_up = future.cancel()
    self._wake.set()
    return given_up

  def room(self) -> bool:
    """Whether one more request may wait."""
    return self.waiting < self._cfg.queue

  def counters(self) -> dict[str, float]:
    """What has been done since the start, and what is going on now."""
    compiled = 0
    if self._thread.ident is not None:
      compiled = compiles.count(self._thread.ident) - self._compiled
    return {
      'requests': self._scheduler.started,
      'tokens_drawn': self.sampled,
      'prompt_tokens_prefilled': self._prefilled,
      'prompt_tokens_cached': self._scheduler.hits,
      'preemptions': self._scheduler.preemptions,
      'swaps': self._swaps,
      'compilations': compiled,
      'pages_used': self._pool.used,
      'pages_total': len(self._pool.all),
      'waiting': self.waiting,
      'busy_slots': len(self._scheduler.running),
    }

  @property
  def waiting(self) -> int:
    """Requests that nobody serves yet."""
    return len(self._scheduler.waiting) + self._inbox.qsize()

  @property
  def busy(self) -> int:
    """Requests being served or waiting."""
    return len(self._scheduler.running) + self.waiting

  def _run(self) -> None:
    try:
      self._compiled = compiles.count(threading.get_ident())
      while not self._stop.is_set():
        if not self._cycle():
          self._wake.wait(timeout=self._cfg.poll_seconds)
          self._wake.clear()
    except BaseException as e:
      self.error = e
      raise
    finally:
      self._fail_all()

  def _cycle(self) -> bool:
    """One round: swap, admit, prefill, decode. False when there was no work."""
    for job in self._scheduler.drop(lambda job: job.gone):
      job.drop()
    while not self._inbox.empty():
      self._scheduler.add(self._inbox.get())
    if self._swapped_if_due():
      self._scheduler.admit(self.version)
    self._device.copy(self._pool.copies())
    if not self._scheduler.running:
      return False
    self._prefill()
    self._decode()
    return True

  def _swapped_if_due(self) -> bool:
    """Takes new weights; False while they wait for running requests to end."""
    drain = self._cfg.on_swap == 'drain'
    if drain and self._pending is not None and self._pending():
      if self._scheduler.running:
        return False
    elif drain:
      return True
    new = self._swap()
    if new is not None:
      params, self.version = new
      self._device.renew(params)
      self._scheduler.renew(recompute=self._cfg.on_swap != 'keep')
      self._swaps += 1
    return True

  def _prefill(self) -> None:
    """Prefills the next pieces of contexts, a dispatch of them at most."""
    tiles = self._scheduler.tiles(self._cfg.prefill_rows, self._cfg.prefill_chunk)
    if not tiles:
      return
    self._device.prefill(tiles)
    for tile in tiles:
      part = tile.slot.job.context[tile.start : tile.stop].tolist()
      self._pool.fill(tile.slot.row, part, self.version)
      self._prefilled += len(part)

  def _decode(self) -> None:
    """One decode dispatch; tells what it drew, and hands finished jobs back."""
    ready = self._scheduler.ready()
    if not ready:
      return
    drawn = self._device.decode(ready)
    for slot, draws in zip(ready, drawn, strict=True):
      job, n = slot.job, draws.token_T.size
      fed = job.context[-1:].tolist() + draws.token_T[: n - 1].tolist()
      self._pool.fill(slot.row, fed, self.version)
      job.drew(
        draws.token_T,
        draws.logp_T,
        draws.entropy_T,
        draws.kept_TK,
        draws.bound_T,
        self.version,
      )
      self.sampled += n
      if not job.finish:
        job.tell()
        continue
      start = min(job.request.routes_from, job.hit or 0)
      routes_RNK = self._device.routes(slot, start, slot.row.size)
      self._scheduler.finish(slot)
      self._seconds += 0.1 * (time.monotonic() - job.came - self._seconds)
      job.tell(routes_RNK, start)

  def _fail_all(self) -> None:
    with self._door:
      self._closed = True
    error = ConnectionError(f'the sampler stopped ({self.error!r})')
    while not self._inbox.empty():
      self._scheduler.add(self._inbox.get())
    running = [slot.job for slot in self._scheduler.running]
    for job in running + self._scheduler.waiting:
      job.fail(error)
