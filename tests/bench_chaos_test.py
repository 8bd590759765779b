"""The chaos bench: its checks find what is wrong, and nothing else."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments import program
from experiments.bench import chaos_check, chaos_parts, chaos_sampler
from swe17 import types
from swe17.rollout import recorded


def answer(context: list[int], ids: list[int], at: int = 0, version: int = 3):
  n = len(ids)
  sets = [sorted({token, 90}) for token in ids]
  request = types.GenerateRequest(
    'g.0.0',
    np.asarray(context, np.int32),
    24,
    (1,),
    types.Sampling(top_k=32, top_p=0.95),
    (1, 2),
  )
  result = types.GenerateResult(
    token_T=np.asarray(ids, np.int32),
    logp_T=-np.arange(1 + at, 1 + at + n, dtype=np.float32) / 10,
    entropy_T=np.ones(n, np.float32),
    version_T=np.full(n, version, np.int32),
    kept=types.KeptSets(
      np.arange(0, 2 * n + 1, 2, dtype=np.int32), np.concatenate(sets).astype(np.int32)
    ),
    finish='length',
  )
  return chaos_parts.Answer(request, result)


def segment(answers) -> types.Segment:
  """One conversation, whole."""
  last = answers[-1]
  size = last.request.token_T.size + last.result.token_T.size
  arrays = {
    name: np.zeros(size, dtype)
    for name, dtype in (
      ('mask_T', bool),
      ('mu_logp_T', np.float32),
      ('entropy_T', np.float32),
      ('temperature_T', np.float32),
      ('version_T', np.int32),
      ('turn_T', np.int32),
    )
  }
  sizes, ids = np.zeros(size, np.int64), []
  for turn, one in enumerate(answers):
    at = slice(
      one.request.token_T.size, one.request.token_T.size + one.result.token_T.size
    )
    arrays['mask_T'][at], arrays['turn_T'][at] = True, turn
    arrays['mu_logp_T'][at] = one.result.logp_T
    arrays['entropy_T'][at] = one.result.entropy_T
    arrays['version_T'][at] = one.result.version_T
    sizes[at] = one.result.kept.size_T
    ids.append(one.result.kept.ids)
  kept = types.KeptSets(
    np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), np.concatenate(ids)
  )
  token_T = np.concatenate([last.request.token_T, last.result.token_T])
  return types.Segment(token_T=token_T, kept=kept, **arrays)


FIRST = answer([5, 6], [10, 11])
SECOND = answer([5, 6, 10, 11, 7], [12, 13, 14], at=2)
SOUND = segment([FIRST, SECOND])


def verdict(*segments: types.Segment, said: int = 2, left: int = 0) -> str:
  agent = chaos_parts.Agent(None, '', '')
  agent.said, agent.left = said, left
  turns = sum(len(np.unique(s.turn_T[s.mask_T])) for s in segments)
  served = recorded.Served(segments, turns, 0, 5, 0, 0, 0, False, 1.0, '')
  return chaos_parts.corrupt(served, agent, [FIRST, SECOND])


def test_an_episode_that_is_what_was_drawn_for_it_is_sound():
  assert verdict(SOUND) == ''
  assert verdict(SOUND, said=1, left=1) == ''


@pytest.mark.parametrize(
  ('field', 'at', 'value'),
  [
    ('token_T', 1, 8),  # another context
    ('token_T', 5, 77),
    ('mu_logp_T', 5, -9.0),
    ('version_T', 2, 4),
    ('entropy_T', 7, 0.0),
    ('mask_T', 7, False),  # a token that is not trained
  ],
)
def test_any_token_that_is_not_as_it_was_drawn_is_found(field, at, value):
  array = getattr(SOUND, field).copy()
  array[at] = value
  assert verdict(dataclasses.replace(SOUND, **{field: array})) != ''


def test_a_turn_that_is_trained_twice_or_not_at_all_is_found():
  assert 'trained twice' in verdict(SOUND, segment([FIRST]))
  assert 'answers recorded' in verdict(segment([FIRST]))
  assert 'answers recorded' in verdict(SOUND, said=1)


def test_sets_that_do_not_hold_their_tokens_are_found():
  assert chaos_check.sets_hold(FIRST.result)
  kept = FIRST.result.kept
  for ids in (kept.ids + 1, kept.ids[::-1]):
    other = dataclasses.replace(kept, ids=ids)
    if (ids[::2] == FIRST.result.token_T).all():
      continue
    assert not chaos_check.sets_hold(dataclasses.replace(FIRST.result, kept=other))
  none = types.KeptSets(np.zeros(3, np.int32), np.zeros(0, np.int32))
  assert not chaos_check.sets_hold(dataclasses.replace(FIRST.result, kept=none))
  up = np.asarray([-0.1, 0.5], np.float32)
  assert not chaos_check.sets_hold(dataclasses.replace(FIRST.result, logp_T=up))


def test_a_stream_that_ends_in_an_error_is_no_answer():
  chunk = {'choices': [{'delta': {'content': 'a'}}]}
  lines = [f'data: {json.dumps(chunk)}', f'data: {json.dumps(chunk)}', 'data: [DONE]']
  data = '\n\n'.join(lines).encode()
  assert chaos_parts._streamed(data) == [{'role': 'assistant', 'content': 'aa'}]
  assert chaos_parts._streamed(data.replace(b'[DONE]', b'{"error": {}}')) is None
  assert chaos_parts._streamed(data[: len(data) // 2]) is None
  assert chaos_parts._streamed(b'') is None


@pytest.fixture(scope='module')
def scored(tmp_path_factory):
  """(checker, answers that versions 0 and 1 drew of one context, their own record)."""
  folder = tmp_path_factory.mktemp('chaos')
  cfg = chaos_parts.settings_of(folder, 2, 4)
  weights = chaos_parts.Weights(cfg, 1024, 0)
  weights.publish()
  weights.publish()
  checker = chaos_check.Checker(cfg, weights.params)
  return cfg, weights, checker


def drawn(scored, older: int, newer: int, cut: int, version: int, n: int = 6):
  """An answer that a cache of two versions gives, position by position."""
  *_, checker = scored
  context = list(range(20, 32))
  one = answer(context, [0] * n, version=version)
  one = dataclasses.replace(one, request=dataclasses.replace(one.request, max_new=n))
  ids: list[int] = []
  logp, sets = [], []
  for t in range(n):
    token_T = np.asarray(ids + [0] * (n - t), np.int32)
    trial = dataclasses.replace(
      one, result=dataclasses.replace(one.result, token_T=token_T)
    )
    logits = checker._logits(trial, older, newer, [cut])[0]
    padded = np.zeros((checker._n, 1024), np.float32)
    padded[:n] = logits
    position_T = len(context) + np.arange(checker._n)
    draw = checker._draw(
      np.asarray(one.request.key, np.uint32),
      position_T,
      padded,
      *chaos_check._filters(one.request),
    )
    ids.append(int(draw.token_B[t]))
    logp.append(float(draw.logp_B[t]))
    sets.append(sorted(i for i in draw.kept_ids_BK[t].tolist() if i >= 0))
  sizes = [len(each) for each in sets]
  result = types.GenerateResult(
    np.asarray(ids, np.int32),
    np.asarray(logp, np.float32),
    np.ones(n, np.float32),
    np.full(n, version, np.int32),
    types.KeptSets(
      np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
      np.concatenate(sets).astype(np.int32),
    ),
    'length',
  )
  return dataclasses.replace(one, result=result)


def test_answers_are_told_by_the_weights_that_drew_them(scored):
  *_, checker = scored
  own = drawn(scored, 1, 1, 0, version=1)
  found = checker.check([own], [set()])
  assert (found.plain, found.cut, found.wrong) == (1, 0, 0)
  assert found.drawn_again == found.same_set == found.tokens == 6
  assert found.worst < 1e-5 < found.control_mean
  # The same tokens under another version's name are found out.
  claimed = dataclasses.replace(
    own, result=dataclasses.replace(own.result, version_T=np.zeros(6, np.int32))
  )
  assert checker.check([claimed], [set()]).wrong == 1


def test_a_cache_that_a_swap_left_is_explained_by_its_cut(scored):
  *_, checker = scored
  mixed = drawn(scored, 0, 1, 7, version=1)
  found = checker.check([mixed], [{0}])
  assert (found.plain, found.cut, found.wrong) == (0, 1, 0)
  assert found.drawn_again == 6
  several = checker.check([mixed], [{0, 2}])
  assert (several.several, several.wrong) == (1, 0)


def test_the_size_for_tests_is_small_and_the_whole_one_is_the_issues():
  program.parse(['chaos_sampler'], chaos_sampler.FLAGS)
  whole = chaos_sampler.sizes()
  assert (whole['agents'], whole['samplers'], whole['every']) == (200, 4, 15.0)
  assert whole['kills'] >= 10
  program.parse(['chaos_sampler', '--quick'], chaos_sampler.FLAGS)
  assert chaos_sampler.sizes()['agents'] == 10
  assert pathlib.Path(chaos_sampler.__file__).stat().st_size > 0
