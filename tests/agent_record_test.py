"""What a sampler's answer must carry: anything missing or impossible is named."""

import dataclasses
import time

import numpy as np
import pytest

from swe17 import types
from swe17.agent import formats, record, tools
from swe17.env import base

REQUEST = types.GenerateRequest(
  session='s',
  token_T=np.arange(5, dtype=np.int32),
  max_new=3,
  stop_ids=(1,),
  sampling=types.Sampling(top_k=8, top_p=0.9),
  key=(0, 0),
  min_version=4,
)
SOUND = types.GenerateResult(
  token_T=np.asarray([20, 30, 1], np.int32),
  logp_T=np.asarray([-0.5, 0.0, -2.0], np.float32),
  entropy_T=np.asarray([0.7, 0.0, 3.0], np.float32),
  version_T=np.asarray([4, 4, 5], np.int32),
  kept=types.KeptSets(
    np.asarray([0, 2, 3, 5], np.int32), np.asarray([20, 21, 30, 1, 30], np.int32)
  ),
  finish='stop',
)
NO_SETS = types.KeptSets(np.zeros(4, np.int32), np.zeros(0, np.int32))


def test_a_sound_answer_passes():
  record.check_result(SOUND, REQUEST, 1024)
  cut = dataclasses.replace(SOUND, finish='length', token_T=SOUND.token_T.copy())
  cut.token_T[2] = 30
  record.check_result(cut, REQUEST, 1024)


def test_sets_may_be_absent_only_if_no_filter_was_on():
  free = dataclasses.replace(REQUEST, sampling=types.Sampling())
  record.check_result(dataclasses.replace(SOUND, kept=NO_SETS), free, 1024)
  record.check_result(SOUND, free, 1024)


@pytest.mark.parametrize(
  ('field', 'value', 'reason'),
  [
    ('logp_T', np.nan, 'bad log-prob at token 1'),
    ('logp_T', np.inf, 'bad log-prob at token 1'),
    ('logp_T', -np.inf, 'bad log-prob at token 1'),
    ('logp_T', 0.1, 'bad log-prob at token 1'),
    ('entropy_T', np.nan, 'bad entropy at token 1'),
    ('entropy_T', -1.0, 'bad entropy at token 1'),
    ('version_T', 3, 'bad version at token 1'),
    ('token_T', 1024, 'bad token id at token 1'),
    ('token_T', -1, 'bad token id at token 1'),
    ('token_T', 900, 'outside its kept set'),
    ('token_T', 1, "finish 'stop' with stop tokens at"),
  ],
)
def test_a_bad_value_is_named_with_its_place(field, value, reason):
  array = getattr(SOUND, field).copy()
  array[1] = value
  with pytest.raises(record.SamplerError, match=reason):
    record.check_result(dataclasses.replace(SOUND, **{field: array}), REQUEST, 1024)


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    ({'logp_T': np.zeros(0, np.float32)}, 'got 0 log-probs for 3 tokens'),
    ({'entropy_T': np.zeros(4, np.float32)}, 'got 4 entropies for 3 tokens'),
    ({'version_T': np.zeros((3, 1), np.int32)}, 'got 3 versions for 3 tokens'),
    ({'token_T': np.zeros(0, np.int32)}, 'got 3 log-probs for 0 tokens'),
    ({'finish': 'length'}, "finish 'length' with stop tokens"),
    ({'finish': 'abort'}, "finish 'abort'"),
    ({'kept': NO_SETS}, 'bad kept set size at token 0'),
    (
      {'kept': types.KeptSets(np.arange(4, dtype=np.int32), np.zeros(1, np.int32))},
      'kept sets and their sizes disagree',
    ),
  ],
)
def test_an_answer_that_lacks_something_is_an_error_not_a_shorter_row(change, reason):
  with pytest.raises(record.SamplerError, match=reason):
    record.check_result(dataclasses.replace(SOUND, **change), REQUEST, 1024)


def test_more_tokens_than_asked_for_are_refused():
  short = dataclasses.replace(REQUEST, max_new=2)
  with pytest.raises(record.SamplerError, match='got 3 tokens, want 1 to 2'):
    record.check_result(SOUND, short, 1024)


def test_a_text_only_answer_is_refused():
  nothing = types.GenerateResult(
    token_T=np.zeros(0, np.int32),
    logp_T=np.zeros(0, np.float32),
    entropy_T=np.zeros(0, np.float32),
    version_T=np.zeros(0, np.int32),
    kept=types.KeptSets(np.zeros(1, np.int32), np.zeros(0, np.int32)),
    finish='stop',
  )
  with pytest.raises(record.SamplerError, match='got 0 tokens, want 1 to 3'):
    record.check_result(nothing, REQUEST, 1024)


def test_tokens_that_top_k_decided_add_up_over_turns():
  log = record.Record(formats.load(), lambda: 0.0)
  for turn, count in enumerate((1, 2)):
    log.sampled(dataclasses.replace(SOUND, topk_bound=count), turn, 1.0)
  assert log.topk_bound == 3


async def test_a_read_that_was_asked_before_is_a_duplicate_until_something_is_written():
  class Env:
    tools = (
      base.Tool('look', 'Look.', {'at': 'str'}, writes=False),
      base.Tool('change', 'Change.', {}, writes=True),
    )
    done = False

    async def step(self, name, arguments):
      return name

  def call(name: str, **arguments) -> tools.Call:
    return tools.Call(f'c{len(made)}', name, arguments)

  log, made = record.Record(formats.load(), time.monotonic), []
  await log.run(
    [call('look', at='x'), call('look', at='y')], Env(), most=8, seconds=9.0
  )
  assert log.duplicates == 0
  await log.run([call('look', at='x')], Env(), most=8, seconds=9.0)
  assert log.duplicates == 1
  await log.run([call('change'), call('look', at='x')], Env(), most=8, seconds=9.0)
  await log.run([call('change'), call('change')], Env(), most=8, seconds=9.0)
  assert (log.duplicates, log.calls) == (1, 7)
