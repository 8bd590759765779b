"""Who is served next: order, pages, preemption, sharing; without any device."""

import concurrent.futures

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from swe17 import types
from swe17.sampler import job as jobs
from swe17.sampler import pages, scheduler

S, STEPS = 4, 2


def job(name: str, prompt: list[int], new: int = 4, min_version: int = 0) -> jobs.Job:
  request = types.GenerateRequest(
    name, np.array(prompt, np.int32), new, (), types.Sampling(), (0, 0), min_version
  )
  return jobs.Job(request, concurrent.futures.Future())


class Sampler:
  """An engine's cycle without a device: draws the next number after the last one."""

  def __init__(self, slots: int, count: int, tiles: int = 2, chunk: int = 3):
    self.pool = pages.Pool(count, S)
    self.scheduler = scheduler.Scheduler(slots, self.pool, steps=STEPS)
    self.tiles, self.chunk = tiles, chunk
    self.version, self.prefilled = 0, 0
    self.ended: list[str] = []
    self.most_pages = 0

  def cycle(self) -> None:
    self.scheduler.admit(self.version)
    self.pool.copies()
    for tile in self.scheduler.tiles(self.tiles, self.chunk):
      assert tile.start == tile.slot.row.size
      part = tile.slot.job.context[tile.start : tile.stop].tolist()
      self.pool.fill(tile.slot.row, part, self.version)
      self.prefilled += len(part)
    for slot in self.scheduler.ready():
      n = min(STEPS, slot.job.left)
      drawn = [int(slot.job.context[-1]) + 1 + i for i in range(n)]
      fed = [int(slot.job.context[-1]), *drawn[:-1]]
      self.pool.fill(slot.row, fed, self.version)
      slot.job.token += drawn
      assert slot.row.token == slot.job.context[:-1].tolist()
      if not slot.job.left:
        self.scheduler.finish(slot)
        self.ended.append(slot.job.request.session)
    self.most_pages = max(self.most_pages, self.pool.used)

  def run(self, cycles: int = 400) -> None:
    for _ in range(cycles):
      if not self.scheduler.running and not self.scheduler.waiting:
        return
      self.cycle()
    raise AssertionError(f'{len(self.scheduler.waiting)} requests still wait')


def sessions(found: list[scheduler.Slot]) -> list[str]:
  return [slot.job.request.session for slot in found]


def test_requests_start_in_the_order_they_came_as_slots_become_free():
  made = Sampler(slots=2, count=20)
  for name in 'abcd':
    made.scheduler.add(job(name, [ord(name)] * 3))
  assert sessions(made.scheduler.admit(0)) == ['a', 'b']
  made.run()
  assert made.ended == ['a', 'b', 'c', 'd']


def test_a_request_without_pages_keeps_those_behind_it_waiting():
  """Small ones that always fit would starve it otherwise."""
  made = Sampler(slots=4, count=6)
  made.scheduler.add(job('a', [1] * 9))
  made.scheduler.add(job('big', [2] * 16))
  made.scheduler.add(job('small', [3]))
  assert sessions(made.scheduler.admit(0)) == ['a']
  made.run()
  assert made.ended[0] == 'a'


def test_one_that_waits_for_newer_weights_holds_up_nobody():
  made = Sampler(slots=1, count=6)
  made.scheduler.add(job('late', [1], min_version=1))
  made.scheduler.add(job('now', [2]))
  assert sessions(made.scheduler.admit(0)) == ['now']
  made.version = 1
  made.run()
  assert made.ended == ['now', 'late']


def test_the_youngest_is_preempted_keeps_what_it_drew_and_ends_as_if_it_never_was():
  made = Sampler(slots=2, count=6)
  old, young = job('old', [1] * 3, 14), job('young', [50] * 3, 14)
  made.scheduler.add(old)
  made.scheduler.add(young)
  made.run()
  assert made.scheduler.preemptions > 0
  assert made.ended == ['old', 'young']
  assert old.token == list(range(2, 16)) and young.token == list(range(51, 65))
  assert made.most_pages <= 6


def test_a_groups_prompt_is_prefilled_once_even_if_all_come_at_once():
  made = Sampler(slots=16, count=120, tiles=2, chunk=5)
  prompt = list(range(1, 24))
  for m in range(16):
    made.scheduler.add(job(str(m), prompt))
  made.run()
  assert made.prefilled == 22
  assert made.scheduler.hits == 15 * 22
  assert len(made.ended) == 16


def test_one_that_waits_for_a_prompt_goes_on_when_its_maker_is_gone():
  made = Sampler(slots=4, count=40, tiles=1)
  prompt = list(range(1, 24))
  first, second = job('a', prompt), job('b', prompt)
  made.scheduler.add(first)
  made.scheduler.add(second)
  made.cycle()
  assert sessions(made.scheduler.running) == ['a']
  made.scheduler.drop(lambda j: j is first)
  made.run()
  assert made.ended == ['b']
  assert made.prefilled == 22  # also what its maker had done


def test_a_next_turn_takes_over_its_session_and_others_its_beginning():
  made = Sampler(slots=1, count=20)
  first = job('a', [1, 2, 3, 4, 5])
  made.scheduler.add(first)
  made.run()
  made.prefilled = 0
  made.scheduler.add(job('a', [*first.context.tolist(), 7, 8, 9]))
  made.run()
  assert made.prefilled == 1 + 3 - 1  # the last drawn, the new ones but the last
  made.scheduler.add(job('b', [1, 2, 3, 4, 5, 99]))
  made.run()
  assert made.prefilled == 3


def test_after_a_swap_a_session_goes_on_and_nobody_else_finds_its_pages():
  made = Sampler(slots=1, count=20)
  first = job('a', [1, 2, 3, 4, 5])
  made.scheduler.add(first)
  made.run()
  made.version = 1
  made.scheduler.renew(recompute=False)
  made.prefilled = 0
  made.scheduler.add(job('a', [*first.context.tolist(), 7]))
  made.run()
  assert made.prefilled == 1
  made.scheduler.add(job('b', [1, 2, 3, 4, 5, 7]))
  made.run()
  assert made.prefilled == 1 + 5


def test_with_recompute_a_running_context_is_prefilled_anew_and_goes_on():
  made = Sampler(slots=2, count=20)
  running = job('a', [1, 2, 3, 4, 5], 8)
  made.scheduler.add(running)
  for _ in range(3):
    made.cycle()
  drawn = len(running.token)
  assert 0 < drawn < 8
  made.prefilled, made.version = 0, 1
  made.scheduler.renew(recompute=True)
  made.run()
  assert made.prefilled == 5 + drawn - 1
  assert running.token == list(range(6, 14)) and running.hit == 0


def test_a_long_context_does_not_hold_up_the_prefill_of_short_ones():
  made = Sampler(slots=3, count=60, tiles=2, chunk=3)
  made.scheduler.add(job('long', list(range(100))))
  made.scheduler.add(job('short', [7, 8, 9]))
  made.run()
  assert made.ended == ['short', 'long']


requests = st.lists(
  st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(0, 3)), max_size=14
)


@hypothesis.given(requests, st.integers(9, 24), st.integers(1, 5))
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.example(  # a full page whose twin, filled before it, is gone
  [(1, 1, 0), (1, 5, 0), (4, 1, 0), (10, 4, 1), (1, 1, 0)]
  + [(1, 3, 0), (4, 3, 0), (1, 1, 0), (1, 1, 0), (5, 1, 0)],
  11,
  4,
)
def test_every_request_ends_with_all_its_tokens_however_few_pages_there_are(
  asked, count, slots
):
  """36 positions at most, 9 pages: any one alone fits."""
  made = Sampler(slots, count)
  added = []
  for i, (size, new, kind) in enumerate(asked):
    added.append(job(str(i), [kind] * size, new))
    made.scheduler.add(added[-1])
    if i % 3 == 0:
      made.cycle()
  made.run(3000)
  assert sorted(made.ended) == sorted(str(i) for i in range(len(asked)))
  for one, (_, new, kind) in zip(added, asked, strict=True):
    assert one.token == list(range(kind + 1, kind + 1 + new))
  assert made.pool.used == 0


def test_sessions_that_are_long_gone_are_forgotten(monkeypatch):
  monkeypatch.setattr(scheduler, '_SESSIONS', 3)
  made = Sampler(slots=1, count=40)
  for i in range(6):
    made.scheduler.add(job(str(i), [i] * 5))
  made.run()
  assert list(made.scheduler._sessions) == ['3', '4', '5']


def test_a_finished_job_is_in_no_slot_and_a_dropped_one_nowhere():
  made = Sampler(slots=1, count=40)
  running, waiting = job('a', [1] * 5), job('b', [2] * 5)
  made.scheduler.add(running)
  made.scheduler.add(waiting)
  made.cycle()
  assert set(made.scheduler.drop(lambda _: True)) == {running, waiting}
  assert made.pool.used == 0 and made.scheduler.slots == [None]
  with pytest.raises(IndexError):
    _ = made.scheduler.running[0]
