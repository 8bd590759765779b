"""Who is served next, and with which pages. Pure: no device, no clock, no thread.

Requests are admitted in the order they came, each as soon as a slot is free and there
are pages for its context. When pages run out between two dispatches, the youngest
request is preempted: its pages go, what it has drawn stays, and it waits, at its old
place in the order, to be prefilled again. The oldest is never preempted, and any one
alone fits the pool, so every request ends.

A request that begins as one does that is being prefilled waits until that part is done,
and takes it over: a group's prompt is computed once.
"""

import bisect
import collections
from collections.abc import Callable
import dataclasses

import numpy as np

from swe17.sampler import job as jobs
from swe17.sampler import pages

_SESSIONS = 4096  # idle sessions that are remembered


@dataclasses.dataclass(eq=False)
class Slot:
  """A job that is being served, and its pages."""

  index: int
  job: jobs.Job
  row: pages.Row

  @property
  def missing(self) -> int:
    """Tokens of the context (drawn ones included) that have no entries yet."""
    return self.job.size - self.row.size


@dataclasses.dataclass(frozen=True)
class Tile:
  """Context tokens `start` to `stop` (excluded) of a slot, to be prefilled."""

  slot: Slot
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Held:
  """What an idle session left: its ids, and the row that held them."""

  token_T: np.ndarray
  row: pages.Row


class Scheduler:
  """Slots, the waiting line, and idle sessions. Not for several threads."""

  def __init__(self, slots: int, pool: pages.Pool, *, steps: int):
    """`steps`: tokens that one dispatch draws for a slot."""
    self.pool = pool
    self.slots: list[Slot | None] = [None] * slots
    self.waiting: list[jobs.Job] = []  # by `order`
    self.started = self.hits = self.preemptions = 0
    self._steps = steps
    self._sessions: collections.OrderedDict[str, Held] = collections.OrderedDict()
    self._came = 0

  @property
  def running(self) -> list[Slot]:
    """Busy slots, the oldest request first."""
    busy = [slot for slot in self.slots if slot is not None]
    return sorted(busy, key=lambda slot: slot.job.order)

  def add(self, job: jobs.Job) -> None:
    """Lets a job wait, behind all that came before it."""
    job.order = self._came
    self._came += 1
    self.waiting.append(job)

  def drop(self, gone: Callable[[jobs.Job], bool]) -> list[jobs.Job]:
    """Takes out the jobs that are `gone`, waiting or running."""
    dropped = [job for job in self.waiting if gone(job)]
    self.waiting = [job for job in self.waiting if job not in dropped]
    for slot in self.running:
      if gone(slot.job):
        self.finish(slot)
        dropped.append(slot.job)
    return dropped

  def admit(self, version: int) -> list[Slot]:
    """Starts waiting jobs, in order, while there are slots and pages."""
    started, still = [], []
    for at, job in enumerate(self.waiting):
      if None not in self.slots:
        still += self.waiting[at:]
        break
      if job.request.min_version > version:
        still.append(job)
        continue
      found, of_version = self._found(job, version)
      if self._being_computed(job, version) >= found.size + self._worth:
        still.append(job)
        continue
      busy = len(self.running)  # each may need a page before the next dispatch
      positions = job.size + min(self._steps, job.left)
      if self.pool.wants(found, positions) > self.pool.available - busy:
        if busy:
          still += self.waiting[at:]
          break
        found, of_version = pages.Found([]), version  # it fits, if it keeps nothing
      started.append(self._start(job, found, of_version))
    self.waiting = still
    return started

  def tiles(self, count: int, chunk: int) -> list[Tile]:
    """The next `count` pieces of at most `chunk` tokens to be prefilled.

    All of a context but its last token, which the decode step feeds. Slots take turns,
    so that a long context does not hold up short ones; pieces of one context are in
    order, and each may attend to those before it.
    """
    at = {slot: slot.row.size for slot in self.running if slot.missing > 1}
    found: list[Tile] = []
    while at and len(found) < count:
      for slot in list(at)[: count - len(found)]:
        stop = min(at[slot] + chunk, slot.job.size - 1)
        found.append(Tile(slot, at[slot], stop))
        at[slot] = stop
        if stop == slot.job.size - 1:
          del at[slot]
    return found

  def ready(self) -> list[Slot]:
    """Slots that the next dispatch draws for, by index; they have the pages for it.

    Preempts the youngest while there are too few.
    """
    for slot in self.running:
      if slot.missing > 1:
        continue
      positions = slot.row.size + min(self._steps, slot.job.left)
      while self.slots[slot.index] is slot:
        if self.pool.reserve(slot.row, positions):
          break
        self._preempt(self.running[-1])
    return [slot for slot in self.slots if slot is not None and slot.missing == 1]

  def finish(self, slot: Slot) -> None:
    """Frees a slot. Its session may come back for what its pages hold."""
    self._leave(slot)
    held = Held(slot.job.context[: slot.row.size], slot.row)
    self._sessions[slot.job.request.session] = held
    self._sessions.move_to_end(slot.job.request.session)
    if len(self._sessions) > _SESSIONS:
      self._sessions.popitem(last=False)

  def renew(self, *, recompute: bool) -> None:
    """New weights: nobody finds what the old ones computed.

    recompute: nor do those go on with it who had it, running or between two turns.
    """
    self.pool.renew()
    if not recompute:
      return
    self._sessions.clear()
    for slot in self.running:
      self._leave(slot)
      slot.job.row, slot.job.hit = None, 0
      bisect.insort(self.waiting, slot.job, key=lambda job: job.order)

  @property
  def _worth(self) -> int:
    """Tokens of prefill that it is worth waiting for."""
    return max(self.pool.size // 4, 1)

  def _found(self, job: jobs.Job, version: int) -> tuple[pages.Found, int | None]:
    """What a job may take over, and the version that computed all of it."""
    context_T = job.context
    # At least the last token is fed again: its logits give the next draw.
    limit = context_T.size - 1
    best, of_version = self.pool.find(context_T[:limit].tolist(), version), version
    row = job.row
    held = self._sessions.get(job.request.session)
    if row is None and held is not None:
      # A next turn extends what its session holds. Anything else (an evaluation that
      # is run again, at other weights) begins anew.
      n = held.token_T.size
      row = held.row if np.array_equal(context_T[:n], held.token_T) else None
    if row is not None:
      own = self.pool.kept(row, limit)
      if own.size and own.size >= best.size:
        best, of_version = own, row.version
    return best, of_version

  def _being_computed(self, job: jobs.Job, version: int) -> int:
    """Tokens that a context has in common with one that is just being prefilled."""
    most, context_T = 0, job.context[:-1]
    for slot in self.running:
      own = slot.row.version == version or slot.row.size == 0
      if slot.missing > 1 and own:
        common = pages.shared(slot.job.context[:-1], context_T)
        most = max(most, common if common > slot.row.size else 0)
    return most

  def _start(self, job: jobs.Job, found: pages.Found, version: int | None) -> Slot:
    self._sessions.pop(job.request.session, None)
    row = self.pool.open(found, version)
    room = self.pool.reserve(row, job.size)
    assert room, 'a request was admitted without pages for its context'
    job.hit = found.size if job.hit is None else min(job.hit, found.size)
    job.row = None
    self.started += 1
    self.hits += found.size
    slot = Slot(self.slots.index(None), job, row)
    self.slots[slot.index] = slot
    return slot

  def _preempt(self, slot: Slot) -> None:
    self._leave(slot)
    slot.job.row = slot.row
    self.preemptions += 1
    bisect.insort(self.waiting, slot.job, key=lambda job: job.order)

  def _leave(self, slot: Slot) -> None:
    self.pool.close(slot.row)
    self.slots[slot.index] = None
