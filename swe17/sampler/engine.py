"""The engine: requests in, drawn tokens out, on one thread that owns the device.

Fixed slots, continuous batching, prefill in chunks between decode dispatches. A
session keeps its slot, and so its KV cache, between turns until another session
needs it (least recently used goes first); then the next turn is prefilled anew.
Weights are swapped between two dispatches; the cache stays, and every token records
the version that drew it.

Routes (model.moe.replay) are part of the cache: row i says through which experts the
token at position i was fed when its entry was made. So they are those that later draws
attended to: they stay over a swap, and a context that is prefilled anew has new ones,
which the answer carries in place of the caller's.
"""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import queue
import threading
import time

import jax
import numpy as np

from swe17 import config, types
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.sampler import check, compiles, decode
from swe17.sampler import job as jobs


class Full(Exception):
  """As many requests wait as may; ask again in `retry_after_s` seconds."""

  def __init__(self, retry_after_s: float):
    super().__init__(f'the queue is full, ask again in {retry_after_s:.0f} s')
    self.retry_after_s = retry_after_s


@dataclasses.dataclass
class Slot:
  """A cache row: whose session it holds, which tokens, and the job it serves."""

  session: str = ''
  cached: list[int] = dataclasses.field(default_factory=list)
  job: jobs.Job | None = None
  used: int = 0  # tick of last use, for eviction

  @property
  def serving(self) -> jobs.Job:
    assert self.job is not None, 'this slot serves nobody'
    return self.job


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
  ):
    """Args:
    params: values to compute with, already rounded.
    version: their version.
    model: shape.
    cfg: slots, filters, chunk sizes.
    length: positions of the KV cache.
    swap: called between dispatches; returns new params and version, or None.
    """
    self.version = version
    self.sampled = 0
    self._requests = self._prefilled = self._hits = self._swaps = self._compiled = 0
    self._seconds = 1.0  # that a request takes, the last ones weighing most
    self._params, self._model, self._cfg, self._length = params, model, cfg, length
    self._swap = swap
    self._vocab = params.embed_VD.shape[0]
    self._K = cfg.top_k if cfg.sampling.truncates else 0
    if cfg.sampling.truncates and self._K == 0:
      raise ValueError(
        f'sampler.top_k=0 with top_p={cfg.top_p}, min_p={cfg.min_p}: top_k bounds '
        'the recorded set; set it (64 is usual)'
      )
    self._prefill, self._decode = decode.jitted(model, self._K, cfg.decode_steps)
    self._cache = kv.init(model, cfg.slots, length)
    self._slots = [Slot() for _ in range(cfg.slots)]
    self._waiting: list[jobs.Job] = []
    self._inbox: queue.SimpleQueue[jobs.Job] = queue.SimpleQueue()
    self._wake, self._stop = threading.Event(), threading.Event()
    self._door = threading.Lock()  # nobody comes in after the last was sent home
    self._closed = False
    self._tick = 0
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Compiles both programs, then starts serving."""
    self._warm_up()
    self._thread.start()

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
    check.request(request, self._cfg, length=self._length, vocab=self._vocab)
    future: concurrent.futures.Future = concurrent.futures.Future()
    with self._door:
      if self._stop.is_set() or self._closed:
        raise ConnectionError(f'the sampler is stopping ({self.error!r})')
      if not self.room():
        raise Full(self._retry_after())
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
      'requests': self._requests,
      'tokens_drawn': self.sampled,
      'prompt_tokens_prefilled': self._prefilled,
      'prompt_tokens_cached': self._hits,
      'preemptions': 0,
      'swaps': self._swaps,
      'compilations': compiled,
      'pages_used': sum(bool(slot.cached) for slot in self._slots),
      'pages_total': len(self._slots),
      'waiting': self.waiting,
      'busy_slots': sum(slot.job is not None for slot in self._slots),
    }

  @property
  def waiting(self) -> int:
    """Requests that nobody serves yet."""
    return len(self._waiting) + self._inbox.qsize()

  @property
  def busy(self) -> int:
    """Requests being served or waiting."""
    return sum(slot.job is not None for slot in self._slots) + self.waiting

  def _retry_after(self) -> float:
    """Seconds until the queue is likely to be shorter by a slot's share."""
    return min(max(self._seconds, 1.0), 60.0)

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
    """One round: swap, admit, prefill a chunk, decode. False when there was no work."""
    new = self._swap()
    if new is not None:
      self._params, self.version = new
      self._swaps += 1
    for slot in self._slots:
      if slot.job is not None and slot.job.gone:
        slot.job.drop()
        slot.job, slot.used = None, self._tick
    while not self._inbox.empty():
      self._waiting.append(self._inbox.get())
    self._admit()
    working = [slot for slot in self._slots if slot.job is not None]
    if not working:
      return False
    self._prefill_chunk()
    ready = [slot for slot in working if self._missing(slot) == 1]
    if ready:
      self._decode_steps(ready)
    return True

  def _admit(self) -> None:
    """Gives waiting jobs their session's slot, or the least recently used idle one."""
    still = []
    for job in self._waiting:
      if job.gone:
        job.drop()
        continue
      if job.request.min_version > self.version:
        still.append(job)
        continue
      slot = self._find(job.request.session)
      if slot is None:
        still.append(job)
        continue
      context = job.request.token_T.tolist()
      same = slot.session == job.request.session
      # A next turn extends what its session holds. Anything else (an evaluation that
      # is run again, at other weights) begins anew.
      if not same or context[: len(slot.cached)] != slot.cached:
        slot.cached = []
      # At least the last token is fed again: its logits give the first draw.
      slot.cached = slot.cached[: len(context) - 1]
      job.hit = len(slot.cached)
      self._requests += 1
      self._hits += job.hit
      slot.session, slot.job, slot.used = job.request.session, job, self._tick
    self._tick += 1
    self._waiting = still

  def _find(self, session: str) -> Slot | None:
    idle = [slot for slot in self._slots if slot.job is None]
    own = [slot for slot in idle if slot.session == session]
    if own:
      return own[0]
    return min(idle, key=lambda slot: slot.used, default=None)

  def _missing(self, slot: Slot) -> int:
    """Tokens of the context (drawn ones included) that the cache does not hold."""
    job = slot.serving
    return job.request.token_T.size + len(job.token) - len(slot.cached)

  def _prefill_chunk(self) -> None:
    """Prefills a chunk of up to `prefill_rows` slots, all but the last token."""
    need = [i for i, s in enumerate(self._slots) if s.job and self._missing(s) > 1]
    if not need:
      return
    R, T = self._cfg.prefill_rows, self._cfg.prefill_chunk
    token_BT = np.zeros((R, T), np.int32)
    position_BT = np.full((R, T), self._length, np.int32)
    # Unused rows point at row 0 with positions beyond the cache: they write nothing.
    row_B = np.zeros(R, np.int32)
    for r, i in enumerate(sorted(need, key=lambda i: self._slots[i].used)[:R]):
      slot = self._slots[i]
      at = len(slot.cached)
      part = slot.serving.request.token_T[at:-1][:T]
      token_BT[r, : part.size] = part
      position_BT[r, : part.size] = np.arange(at, at + part.size)
      row_B[r] = i
      slot.cached += part.tolist()
      self._prefilled += part.size
    self._cache = self._prefill(self._params, self._cache, token_BT, position_BT, row_B)

  def _decode_steps(self, ready: list[Slot]) -> None:
    """One decode dispatch; hands finished jobs back."""
    before = self._host_slots({id(slot) for slot in ready})
    self._cache, after, draws = self._decode(
      self._params, self._cache, decode.Slots(**jax.device_put(before))
    )
    token_TB, logp_TB, entropy_TB = map(
      np.asarray, (draws.token_B, draws.logp_B, draws.entropy_B)
    )
    kept_TBK, bound_TB = map(np.asarray, (draws.kept_ids_BK, draws.topk_bound_B))
    position_B = np.asarray(after.position_B)
    for b, slot in enumerate(self._slots):
      if before['left_B'][b] == 0:
        continue
      job = slot.serving
      n = int(position_B[b] - before['position_B'][b])
      slot.cached += [int(before['token_B'][b]), *token_TB[: n - 1, b].tolist()]
      job.drew(
        token_TB[:n, b],
        logp_TB[:n, b],
        entropy_TB[:n, b],
        kept_TBK[:n, b],
        bound_TB[:n, b],
        self.version,
      )
      self.sampled += n
      if not job.finish:
        job.tell()
        continue
      slot.job, slot.used = None, self._tick
      start = min(job.request.routes_from, job.hit)
      self._seconds += 0.1 * (time.monotonic() - job.came - self._seconds)
      job.tell(self._routes(b, start, len(slot.cached)), start)

  def _routes(self, b: int, start: int, stop: int) -> np.ndarray | None:
    """Routes of a slot's positions from `start` to `stop` (excluded), [R, N, K]."""
    held_BSNK = self._cache.routes
    if held_BSNK is None:
      return None
    S, C = self._length, min(self._length, self._cfg.prefill_chunk)
    # One static size; the last piece begins early enough to fit.
    firsts = [min(at, S - C) for at in range(start, stop, C)]
    parts = [decode.routes(held_BSNK, b, first, size=C) for first in firsts]
    rows = [np.zeros((0, *held_BSNK.shape[2:]), held_BSNK.dtype)]
    for at, first, part in zip(range(start, stop, C), firsts, parts, strict=True):
      rows.append(np.asarray(part)[at - first : min(at + C, stop) - first])
    return np.concatenate(rows)

  def _host_slots(self, ready: set[int]) -> dict[str, np.ndarray]:
    """The fields of a dispatch's `Slots`; slots that are not ready are idle."""
    B = len(self._slots)
    a = {
      'token_B': np.zeros(B, np.int32),
      'position_B': np.zeros(B, np.int32),
      'left_B': np.zeros(B, np.int32),
      'stop_BX': np.full((B, check.STOPS), -1, np.int32),
      'key_B2': np.zeros((B, 2), np.uint32),
      'temperature_B': np.ones(B, np.float32),
      'top_p_B': np.ones(B, np.float32),
      'min_p_B': np.zeros(B, np.float32),
      'top_k_B': np.ones(B, np.int32),
    }
    for b, slot in enumerate(self._slots):
      if id(slot) not in ready:
        continue
      job, request = slot.serving, slot.serving.request
      s = request.sampling
      a['token_B'][b] = job.token[-1] if job.token else request.token_T[-1]
      a['position_B'][b] = len(slot.cached)
      a['left_B'][b] = job.left
      a['stop_BX'][b, : len(request.stop_ids)] = request.stop_ids
      a['key_B2'][b] = request.key
      a['temperature_B'][b] = s.temperature
      a['top_p_B'][b] = s.top_p
      a['min_p_B'][b] = s.min_p
      a['top_k_B'][b] = s.top_k if s.top_k else max(self._K, 1)
    return a

  def _warm_up(self) -> None:
    """Compiles both programs on idle slots, so that no request waits for it."""
    R, T = self._cfg.prefill_rows, self._cfg.prefill_chunk
    beyond_BT = np.full((R, T), self._length, np.int32)
    self._cache = self._prefill(
      self._params,
      self._cache,
      np.zeros((R, T), np.int32),
      beyond_BT,
      np.zeros(R, np.int32),
    )
    idle = decode.Slots(**jax.device_put(self._host_slots(set())))
    self._cache, _, _ = self._decode(self._params, self._cache, idle)
    self._routes(0, 0, 1)
    jax.block_until_ready(self._cache)

  def _fail_all(self) -> None:
    with self._door:
      self._closed = True
    error = ConnectionError(f'the sampler stopped ({self.error!r})')
    while not self._inbox.empty():
      self._waiting.append(self._inbox.get())
    for job in [slot.job for slot in self._slots if slot.job] + self._waiting:
      job.fail(error)
