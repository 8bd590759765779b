"""Requests as their callers see them: parts, stops, cancelling, the queue, counters."""

import dataclasses
import threading

import numpy as np
import pytest

from swe17 import types
from swe17.sampler import engine
from tests import sampler_engine_test as engines
from tests.sampler_engine_test import answers, ask, FILTERED, prompt, serving, WAIT

compiled_once = engines.compiled_once


def equal(a: types.GenerateResult, b: types.GenerateResult) -> None:
  """Every field, bit for bit."""
  for field in dataclasses.fields(types.GenerateResult):
    x, y = getattr(a, field.name), getattr(b, field.name)
    if field.name == 'kept':
      np.testing.assert_array_equal(x.offset_T1, y.offset_T1)
      np.testing.assert_array_equal(x.ids, y.ids)
    else:
      np.testing.assert_array_equal(x, y)


def test_parts_of_a_dispatch_each_join_to_the_answer():
  parts: list[types.GenerateResult] = []
  with serving() as made:
    whole = made.submit(ask(max_new=11), parts.append).result(WAIT)
    (silent,) = answers(made, ask('b', max_new=11))
  assert [p.token_T.size for p in parts] == [4, 4, 3]
  assert [p.finish for p in parts] == ['', '', 'length']
  equal(types.join(parts), whole)
  equal(silent, whole)
  with pytest.raises(ValueError, match='no parts'):
    types.join([])


def test_the_first_part_comes_before_the_answer_is_complete():
  first, told = threading.Event(), []

  def heard(part: types.GenerateResult) -> None:
    told.append(future.done())
    first.set()

  with serving() as made:
    future = made.submit(ask(max_new=40), heard)
    assert first.wait(WAIT)
    future.result(WAIT)
  assert told == [False] * 10


def test_any_of_eight_stop_ids_ends_a_turn():
  with serving() as made:
    (free,) = answers(made, ask())
    drawn = free.token_T.tolist()
    others = [i for i in range(engines.V) if i not in drawn][:7]
    for at in (3, 8):
      stop = drawn[at]
      (cut,) = answers(made, ask(str(at), stop_ids=(*others, stop)))
      assert cut.finish == 'stop'
      assert cut.token_T.tolist() == drawn[: drawn.index(stop) + 1]


def test_a_running_request_that_is_cancelled_frees_its_slot():
  cfg = dataclasses.replace(FILTERED, slots=1)
  first = threading.Event()
  with serving(cfg=cfg) as made:
    long = made.submit(ask(max_new=50), lambda _: first.set())
    assert first.wait(WAIT)
    assert made.cancel(long)
    (other,) = answers(made, ask('b'))
    assert other.token_T.size == 16
    assert made.sampled < 50 + 16
    assert made.busy == 0 and made.error is None
  assert long.cancelled()


def test_a_full_queue_sends_callers_away_until_there_is_room():
  cfg = dataclasses.replace(FILTERED, queue=3)
  with serving(cfg=cfg) as made:
    waiting = [made.submit(ask(str(i), min_version=9)) for i in range(3)]
    assert not made.room()
    with pytest.raises(engine.Full) as full:
      made.submit(ask('more'))
    assert 0 < full.value.retry_after_s <= 60
    made.cancel(waiting[1])
    while not made.room():
      threading.Event().wait(0.01)
    (served,) = answers(made, ask('more'))
    assert served.token_T.size == 16


def test_counters_say_what_was_prefilled_cached_and_drawn():
  with serving() as made:
    first = ask(token_T=prompt(30), max_new=8)
    (a,) = answers(made, first)
    answers(made, engines.next_turn(first, a))
    counted = made.counters()
  assert counted['requests'] == 2
  assert counted['tokens_drawn'] == 8 + 8
  # The last token of a context is fed by the decode step that draws.
  assert counted['prompt_tokens_prefilled'] == 29 + 4
  assert counted['prompt_tokens_cached'] == 30 + 8 - 1
  assert counted['compilations'] == counted['swaps'] == counted['preemptions'] == 0
  assert counted['waiting'] == counted['busy_slots'] == 0
  assert (counted['pages_used'], counted['pages_total']) == (0, 8 * 8)
