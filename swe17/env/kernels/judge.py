"""Verdicts that a process remembers, and what an episode has earned by its candidates.

A candidate that was found wrong, or timed, is not run again: its verdict is kept by the
text of problem and candidate. So the luck of one timing stays with a text as long as
the process lives (the noise band keeps it small); what hung or died is not kept.
"""

import asyncio
from collections import OrderedDict
import hashlib

from swe17 import types
from swe17.env.kernels import bench, rules


class Judge:
  """A bench with a memory; shared by all episodes of a process."""

  def __init__(self, on: bench.Bench, capacity: int = 20_000):
    self._bench = on
    self._capacity = capacity
    self._kept: OrderedDict[bytes, bench.Verdict] = OrderedDict()
    self._running: dict[bytes, asyncio.Task[bench.Verdict]] = {}
    self.hits = self.misses = 0

  async def judge(self, problem: bench.Problem, source: str) -> bench.Verdict:
    """The verdict on a candidate. GraderError if the infrastructure fails."""
    text = '\0'.join((problem.name, problem.reference, source))
    key = hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()
    if key in self._kept:
      self.hits += 1
      self._kept.move_to_end(key)
      return self._kept[key]
    if key in self._running:
      self.hits += 1
    else:
      self.misses += 1
      task = asyncio.create_task(self._bench.measure(problem, source))
      self._running[key] = task
      task.add_done_callback(lambda done: self._ended(key, done))
    # Shielded: who waits may be cancelled, who else waits must not be.
    return await asyncio.shield(self._running[key])

  def _ended(self, key: bytes, done: 'asyncio.Task[bench.Verdict]') -> None:
    del self._running[key]
    if done.cancelled() or done.exception() is not None:
      return
    if done.result().lasting:
      self._kept[key] = done.result()
      while len(self._kept) > self._capacity:
        self._kept.popitem(last=False)


class Account:
  """The candidates of one episode and what they earn.

  The outcome is the best of their scores; a turn's score is that of the last candidate
  it handed in, 0 if it handed in none (Kevin: every turn is a sample with a reward).
  Who cheats once has an outcome of 0, and no turn after that earns anything.

  Attributes:
    left: candidates that may still be handed in.
    best: the best score so far.
  """

  def __init__(self, attempts: int, cap: float):
    self.left, self._cap = attempts, cap
    self.best = self._turn = 0.0
    self._flags: list[str] = []
    self._speedup = 0.0

  @property
  def flags(self) -> tuple[str, ...]:
    """Signs of cheating so far, each once; poor work is none."""
    return tuple(dict.fromkeys(f for f in self._flags if f in rules.CHEATS))

  @property
  def figures(self) -> dict[str, float]:
    """What is worth plotting: the speedup of the best right candidate, 0 if none."""
    return {'speedup': self._speedup}

  def add(self, verdict: bench.Verdict) -> float:
    """Counts a candidate; its score."""
    self.left -= 1
    self._flags += [verdict.flag] if verdict.flag else []
    value = 0.0 if self.flags else bench.score(verdict, self._cap)
    self._turn = value
    if value > self.best:
      self.best, self._speedup = value, verdict.speedup
    return value

  def turn_score(self) -> float:
    """What the turn that just ended has earned; the next one begins with nothing."""
    value, self._turn = self._turn, 0.0
    return value

  def outcome(self) -> types.Outcome:
    """The best score; 0 for who cheated once."""
    if self.flags:
      return types.Outcome(0.0, f'cheating: {"; ".join(self.flags)}')
    return types.Outcome(self.best)


def words(verdict: bench.Verdict) -> str:
  """What an agent is told: the class of its candidate, then what there is to say."""
  if verdict.kind == 'correct':
    return f'correct: {verdict.speedup:.2f} times as fast'
  return f'{verdict.kind}: {verdict.words}' if verdict.words else verdict.kind
