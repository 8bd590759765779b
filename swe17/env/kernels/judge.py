"""Verdicts that a process remembers, and what an episode has earned by its candidates.

A candidate that was found wrong, or timed, is not run again: its verdict is kept by the
text of problem and candidate. So the luck of one timing stays with a text as long as
the process lives (the noise band keeps it small); what hung or died is not kept.
"""

from typing import Protocol

from swe17 import types
from swe17.env import memo
from swe17.env.kernels import bench, rules


class Measures(Protocol):
  """A bench."""

  async def measure(self, problem: bench.Problem, source: str) -> bench.Verdict: ...


class Judging(Protocol):
  """What an environment asks."""

  async def judge(self, problem: bench.Problem, source: str) -> bench.Verdict: ...


class Judge(memo.Memo[bench.Verdict]):
  """A bench with a memory; shared by all episodes of a process."""

  def __init__(self, on: Measures):
    super().__init__(lambda verdict: verdict.lasting)
    self._bench = on

  async def judge(self, problem: bench.Problem, source: str) -> bench.Verdict:
    """The verdict on a candidate. GraderError if the infrastructure fails."""
    text = '\0'.join((problem.name, problem.reference, source))
    return await self.get(text, lambda: self._bench.measure(problem, source))


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
