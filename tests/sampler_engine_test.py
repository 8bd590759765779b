"""The engine on a tiny model: what it draws, records, keeps, swaps and refuses."""

from collections.abc import Callable
import concurrent.futures
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, types
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import transformer
from swe17.ops import logprob
from swe17.sampler import decode, engine

MODEL = config.Model(
  layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, rotary_dim=8
)
V, K, LENGTH = 97, 32, 64
WAIT = 60.0  # s; only a hang takes that long
FILTERED = config.Sampler(
  slots=8,
  decode_steps=4,
  prefill_rows=2,
  prefill_chunk=8,
  page=8,
  top_k=K,
  top_p=0.95,
  poll_seconds=0.01,
)
WHOLE = dataclasses.replace(FILTERED, top_k=0, top_p=1.0)


@pytest.fixture(scope='module', autouse=True)
def compiled_once():
  """Engines of equal shapes share their compiled programs: the file stays quick."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decode, 'jitted', functools.cache(decode.jitted))
    yield


@functools.cache
def weights(seed: int) -> p.Params:
  return p.rounded(p.init(p.abstract(MODEL, V), jax.random.key(seed)))


@contextlib.contextmanager
def serving(
  params: p.Params | None = None,
  cfg: config.Sampler = FILTERED,
  swap: Callable[[], tuple[p.Params, int] | None] = lambda: None,
  version: int = 0,
):
  made = engine.Engine(
    weights(0) if params is None else params,
    version,
    model=MODEL,
    cfg=cfg,
    length=LENGTH,
    swap=swap,
  )
  made.start()
  try:
    yield made
  finally:
    made.close()


def prompt(size: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, V, size).astype(np.int32)


def ask(session: str = 'a', **changes) -> types.GenerateRequest:
  values = {
    'token_T': prompt(11),
    'max_new': 16,
    'stop_ids': (),
    'sampling': FILTERED.sampling,
    'key': (1, 2),
  }
  return types.GenerateRequest(session=session, **{**values, **changes})


def answers(made: engine.Engine, *asked: types.GenerateRequest):
  """Submits all at once, then waits for all."""
  futures = [made.submit(request) for request in asked]
  return [future.result(WAIT) for future in futures]


def same(a: types.GenerateResult, b: types.GenerateResult) -> None:
  """Equal draws and sets, and log-probs up to the order of summation."""
  np.testing.assert_array_equal(a.token_T, b.token_T)
  np.testing.assert_array_equal(a.kept.offset_T1, b.kept.offset_T1)
  np.testing.assert_array_equal(a.kept.ids, b.kept.ids)
  np.testing.assert_allclose(a.logp_T, b.logp_T, atol=1e-5)
  assert a.finish == b.finish


@functools.partial(jax.jit, static_argnames='replay')
def _score(params, token_T, segment_T, target_T, kept_TK, temperature, *, replay):
  position_BT = jnp.arange(token_T.size)[None, :]
  hidden_BTD = transformer.apply(
    params, token_T[None], position_BT, segment_T[None], cfg=MODEL
  )
  logits_BTV = transformer.logits(params, hidden_BTD)
  temperature_BT = jnp.full((1, token_T.size), temperature)
  scores = logprob.score(
    logits_BTV, target_T[None], kept_TK[None], temperature_BT, replay=replay
  )
  return logits_BTV[0], scores.logp_BT[0], scores.kept_mass_BT[0]


def learner(
  request: types.GenerateRequest,
  result: types.GenerateResult,
  params: p.Params | None = None,
  replay: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(logits, log-prob, kept mass) of the drawn tokens, as the learner scores them."""
  n, m = request.token_T.size, result.token_T.size
  row = np.zeros(LENGTH + 1, np.int32)
  row[: n + m] = np.concatenate([request.token_T, result.token_T])
  kept_TK = np.full((LENGTH, K), -1, np.int32)
  for t in range(m):
    ids = result.kept.ids[result.kept.offset_T1[t] : result.kept.offset_T1[t + 1]]
    kept_TK[n - 1 + t, : ids.size] = ids
  found = _score(
    weights(0) if params is None else params,
    row[:-1],
    (np.arange(LENGTH) < n + m - 1).astype(np.int32),
    row[1:],
    kept_TK,
    request.sampling.temperature or 1.0,
    replay=replay,
  )
  return tuple(np.asarray(x)[n - 1 : n - 1 + m] for x in found)


def spy_prefill(made: engine.Engine) -> list[int]:
  """Records how many real tokens each prefill dispatch writes."""
  sizes, original = [], made._device.prefill_program

  def prefill(params, cache, token_BT, position_BT, table_BJ):
    sizes.append(int((position_BT < LENGTH).sum()))
    return original(params, cache, token_BT, position_BT, table_BJ)

  made._device.prefill_program = prefill
  return sizes


# --- what is drawn ------------------------------------------------------------


def test_members_of_a_group_differ_on_a_uniform_model():
  flat = jax.tree.map(jnp.zeros_like, weights(0))
  sampling = types.Sampling()
  with serving(flat, WHOLE) as made:
    results = answers(
      made, *(ask(str(m), key=(7, m), sampling=sampling) for m in range(8))
    )
  rows = [tuple(r.token_T.tolist()) for r in results]
  assert len(set(rows)) == 8
  for row in rows:
    assert not any(len(set(row[i : i + 5])) == 1 for i in range(len(row) - 4))
  np.testing.assert_allclose(results[0].entropy_T, np.log(V), rtol=1e-5)


def test_a_session_alone_replays_what_it_drew_in_a_full_batch():
  asked = [
    ask(str(m), key=(3, m), token_T=prompt(5 + 3 * m, m), max_new=9 + m)
    for m in range(8)
  ]
  with serving() as made:
    together = answers(made, *asked)
  with serving() as made:
    alone = [answers(made, request)[0] for request in reversed(asked)][::-1]
  for a, b in zip(together, alone, strict=True):
    same(a, b)


def test_drawn_tokens_lie_in_their_sets_and_carry_the_version():
  with serving(version=5) as made:
    asked = [ask(str(m), key=(9, m)) for m in range(8)]
    results = answers(made, *asked)
    assert made.sampled == sum(r.token_T.size for r in results) == 8 * 16
  for result in results:
    assert (result.version_T == 5).all()
    assert (result.kept.size_T >= 1).all()
    for t, token in enumerate(result.token_T):
      ids = result.kept.ids[result.kept.offset_T1[t] : result.kept.offset_T1[t + 1]]
      assert token in ids
      assert (np.diff(ids) > 0).all()


def test_greedy_draws_the_argmax_with_a_set_of_one():
  sampling = types.Sampling(temperature=0.0)
  with serving() as made:
    asked = [ask('a', sampling=sampling), ask('b', sampling=sampling, key=(8, 8))]
    a, b = answers(made, *asked)
  same(a, b)
  assert (a.kept.size_T == 1).all()
  assert (a.logp_T == 0).all()
  logits_TV = learner(asked[0], a)[0]
  np.testing.assert_array_equal(a.token_T, logits_TV.argmax(axis=-1))


def test_tokens_whose_set_top_k_decided_are_counted():
  # Equal logits: top-p asks for far more ids than top-k leaves, at every token.
  flat = jax.tree.map(jnp.zeros_like, weights(0))
  narrow = dataclasses.replace(ask('b').sampling, top_p=0.001)  # one id will do
  with serving(flat) as made:
    bound, free = answers(made, ask('a'), ask('b', sampling=narrow))
  assert bound.topk_bound == bound.token_T.size > 0
  assert free.topk_bound == 0


def test_the_stop_token_is_returned_and_ends_the_turn():
  with serving() as made:
    (free,) = answers(made, ask('a'))
    stop = int(free.token_T[6])
    at = free.token_T.tolist().index(stop)
    (cut,) = answers(made, ask('b', stop_ids=(stop,)))
  assert free.finish == 'length'
  assert free.token_T.size == 16
  assert cut.finish == 'stop'
  np.testing.assert_array_equal(cut.token_T, free.token_T[: at + 1])


def test_a_stop_token_as_the_last_allowed_one_is_a_stop():
  with serving() as made:
    (free,) = answers(made, ask('a', max_new=1))
    (cut,) = answers(made, ask('b', max_new=1, stop_ids=(int(free.token_T[0]),)))
  assert (free.finish, cut.finish) == ('length', 'stop')


def test_the_cache_may_be_filled_to_its_last_position():
  with serving() as made:
    (result,) = answers(made, ask(token_T=prompt(LENGTH - 3), max_new=3))
  assert result.token_T.size == 3


# --- what is recorded ---------------------------------------------------------

SETTINGS = [
  types.Sampling(temperature, 0.0, top_k, top_p)
  for temperature in (0.6, 1.0)
  for top_k, top_p in ((0, 0.95), (0, 0.8), (5, 1.0), (5, 0.8))
]


def test_logps_equal_the_learners_and_are_exactly_zero_for_singletons():
  peaked = types.Sampling(0.15, 0.0, 0, 0.8)
  asked = [
    ask(str(i), sampling=s, key=(i, i), token_T=prompt(9, i), max_new=32)
    for i, s in enumerate([*SETTINGS, peaked])
  ]
  with serving() as made:
    results = answers(made, *asked)
  singletons = 0
  for request, result in zip(asked, results, strict=True):
    logp_T = learner(request, result)[1]
    lone_T = result.kept.size_T == 1
    np.testing.assert_allclose(logp_T, result.logp_T, atol=1e-5, rtol=0)
    assert (logp_T[lone_T] == 0).all()
    assert (result.logp_T[lone_T] == 0).all()
    if request.sampling.top_k:
      assert result.kept.size_T.max() <= request.sampling.top_k
    singletons += int(lone_T.sum())
  assert singletons >= 3


def test_logps_of_an_unfiltered_draw_equal_the_learners_and_have_no_sets():
  asked = [
    ask(str(t), sampling=types.Sampling(t), key=(int(10 * t), 1), max_new=32)
    for t in (0.6, 1.0, 1.3)
  ]
  with serving(cfg=WHOLE) as made:
    results = answers(made, *asked)
  for request, result in zip(asked, results, strict=True):
    assert result.kept.ids.size == 0
    np.testing.assert_allclose(
      learner(request, result)[1], result.logp_T, atol=1e-5, rtol=0
    )


def test_without_replay_the_mean_ratio_is_the_mean_kept_mass():
  asked = [ask(str(m), key=(4, m), max_new=32) for m in range(8)]
  with serving() as made:
    results = answers(made, *asked)
  ratio, mass = [], []
  for request, result in zip(asked, results, strict=True):
    _, logp_T, mass_T = learner(request, result, replay=False)
    ratio += np.exp(logp_T - result.logp_T).tolist()
    mass += mass_T.tolist()
  assert np.mean(mass) < 0.97
  assert abs(np.mean(ratio) / np.mean(mass) - 1) < 0.01


def test_entropy_is_of_the_whole_vocabulary_at_the_sampling_temperature():
  request = ask(sampling=types.Sampling(0.7, 0.0, 5, 1.0))
  with serving() as made:
    (result,) = answers(made, request)
  z_TV = learner(request, result)[0].astype(np.float64) / 0.7
  prob_TV = np.exp(z_TV - z_TV.max(axis=-1, keepdims=True))
  prob_TV /= prob_TV.sum(axis=-1, keepdims=True)
  want_T = -(prob_TV * np.log(prob_TV)).sum(axis=-1)
  np.testing.assert_allclose(result.entropy_T, want_T, atol=1e-4)


# --- what is kept -------------------------------------------------------------


def next_turn(request, result, glue: int = 4) -> types.GenerateRequest:
  token_T = np.concatenate([request.token_T, result.token_T, prompt(glue, 5)])
  return dataclasses.replace(request, token_T=token_T.astype(np.int32))


def test_a_prompt_longer_than_a_chunk_scores_as_the_learner_does():
  request = ask(token_T=prompt(29), max_new=8)
  with serving() as made:
    sizes = spy_prefill(made)
    (result,) = answers(made, request)
  assert sizes == [16, 12]  # two pieces of it at a time
  np.testing.assert_allclose(learner(request, result)[1], result.logp_T, atol=1e-5)


def test_a_next_turn_uses_the_kept_cache_and_draws_as_if_prefilled_anew():
  first = ask()
  with serving() as made:
    sizes = spy_prefill(made)
    (a,) = answers(made, first)
    assert sum(sizes) == 10
    sizes.clear()
    second = next_turn(first, a)
    (kept,) = answers(made, second)
    assert sum(sizes) == 4  # the last drawn token and all but one of the glue
    (anew,) = answers(made, dataclasses.replace(second, session='other'))
  same(kept, anew)
  np.testing.assert_allclose(learner(second, kept)[1], kept.logp_T, atol=1e-5)


def test_the_least_recently_used_session_is_evicted_and_prefilled_anew():
  cfg = dataclasses.replace(FILTERED, kv_pages=8)  # two sessions of 27 tokens
  with serving(cfg=cfg) as made:
    sizes = spy_prefill(made)
    asked = {s: ask(s, key=(ord(s), 0), token_T=prompt(11, ord(s))) for s in 'abc'}
    got = {s: answers(made, asked[s])[0] for s in 'abc'}  # c takes a's pages
    sizes.clear()
    later = {s: next_turn(asked[s], got[s]) for s in 'ab'}
    answers(made, later['b'])
    assert sum(sizes) == 4
    sizes.clear()
    (again,) = answers(made, later['a'])
    assert sum(sizes) == later['a'].token_T.size - 1
  with serving() as made:
    same(again, answers(made, later['a'])[0])


def test_more_sessions_than_slots_are_all_served():
  cfg = dataclasses.replace(FILTERED, slots=2)
  with serving(cfg=cfg) as made:
    results = answers(made, *(ask(str(m), key=(m, 0)) for m in range(7)))
    assert made.busy == 0
  assert [r.token_T.size for r in results] == [16] * 7


# --- weights ------------------------------------------------------------------


class Publishing:
  """A `swap` that hands over version 1 once the engine has drawn `after` tokens."""

  def __init__(self, after: int):
    self.after, self.made, self.done = after, None, False

  def __call__(self):
    if self.made is None or self.done or self.made.sampled < self.after:
      return None
    self.done = True
    return weights(1), 1


def mixed_logp(request, result, at: int) -> np.ndarray:
  """Log-probs of tokens drawn by version 1 over a cache that version 0 began."""
  n = request.token_T.size
  token_T = np.concatenate([request.token_T, result.token_T])[:-1]
  position_T = np.arange(token_T.size)
  cache = kv.init(MODEL, 1, LENGTH)
  hidden = []
  for part, params in ((slice(0, at), weights(0)), (slice(at, None), weights(1))):
    out, cache, _ = transformer.apply_cached(
      params, token_T[None, part], position_T[None, part], cache, None, cfg=MODEL
    )
    hidden.append(out)
  logits_TV = np.asarray(transformer.logits(weights(1), hidden[1])[0], np.float64)
  first = at - (n - 1)  # the draw made at input position `at`
  logp = []
  for t in range(first, result.token_T.size):
    ids = result.kept.ids[result.kept.offset_T1[t] : result.kept.offset_T1[t + 1]]
    z_V = logits_TV[t - first]
    logp.append(z_V[result.token_T[t]] - np.log(np.exp(z_V[ids]).sum()))
  return np.array(logp)


def test_a_swap_in_mid_turn_steps_the_version_once_and_keeps_the_cache():
  swap = Publishing(after=5)
  request = ask(max_new=20)
  with serving(swap=swap) as made:
    swap.made = made
    sizes = spy_prefill(made)
    (result,) = answers(made, request)
    assert sum(sizes) == request.token_T.size - 1  # nothing was prefilled again
  step_T = np.diff(result.version_T)
  assert sorted(step_T.tolist()) == [0] * 18 + [1]
  cut = int(np.argmax(result.version_T))
  before = learner(request, result)[1][:cut]
  np.testing.assert_allclose(before, result.logp_T[:cut], atol=1e-5)
  after = mixed_logp(request, result, request.token_T.size - 1 + cut)
  np.testing.assert_allclose(after, result.logp_T[cut:], atol=1e-5)


@pytest.mark.parametrize('session', ['fresh', 'a'])
def test_a_session_that_begins_after_a_swap_draws_as_a_cold_engine(session):
  """Also when its name was used before: an evaluation that is run again."""
  swap = Publishing(after=1)
  with serving(swap=swap) as made:
    (old,) = answers(made, ask('a'))
    swap.made = made
    (warm,) = answers(made, ask(session, min_version=1))
  with serving(weights(1), version=1) as made:
    (cold,) = answers(made, ask(session))
  assert old.token_T.tolist() != warm.token_T.tolist()
  assert (warm.version_T == 1).all()
  same(warm, cold)


def test_a_request_waits_for_its_version_while_others_are_served():
  swap = Publishing(after=16)
  with serving(swap=swap) as made:
    late = made.submit(ask('late', min_version=1))
    answers(made, ask('now'))
    assert not late.done()
    swap.made = made
    assert (late.result(WAIT).version_T == 1).all()


# --- ends and refusals --------------------------------------------------------


def test_close_fails_open_requests_with_a_connection_error():
  with serving() as made:
    waiting = [made.submit(ask(str(m), min_version=9)) for m in range(3)]
    made.close()
    for future in waiting:
      with pytest.raises(ConnectionError, match='stopped'):
        future.result(WAIT)
    with pytest.raises(ConnectionError, match='stopping'):
      made.submit(ask())


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_failed_swap_ends_the_engine_and_says_why():
  bad = []

  def swap():
    if bad:
      raise RuntimeError('version 3: the device does not hold the staged bytes')

  with serving(swap=swap) as made:
    waiting = made.submit(ask(min_version=3))
    bad.append(True)
    with pytest.raises(ConnectionError, match='version 3'):
      waiting.result(WAIT)
    assert isinstance(made.error, RuntimeError)
    with pytest.raises(ConnectionError, match='version 3'):
      made.submit(ask())


def test_a_request_that_was_given_up_does_not_stop_the_others():
  with serving() as made:
    gone = made.submit(ask('gone', min_version=9))
    assert gone.cancel()
    running = made.submit(ask('b'))
    concurrent.futures.wait([running], WAIT)
    assert running.result().token_T.size == 16
    assert made.error is None


BAD = [
  ('session', {'session': 3}),
  ('token', {'token_T': np.zeros((2, 3), np.int32)}),
  ('token', {'token_T': np.zeros(0, np.int32)}),
  ('token', {'token_T': np.array([1, V], np.int32)}),
  ('token', {'token_T': np.array([-1, 2], np.int32)}),
  ('token', {'token_T': np.array([1.0, 2.0], np.float32)}),
  ('max_new', {'max_new': 0}),
  ('max_new', {'max_new': LENGTH - 10}),
  ('max_new', {'max_new': 2.5}),
  ('max_new', {'max_new': True}),
  ('stop_ids', {'stop_ids': tuple(range(9))}),
  ('stop_ids', {'stop_ids': (V,)}),
  ('stop_ids', {'stop_ids': ('x',)}),
  ('key', {'key': (1,)}),
  ('key', {'key': (1, 1 << 32)}),
  ('key', {'key': (-1, 0)}),
  ('key', {'key': ('a', 'b')}),
  ('min_version', {'min_version': -1}),
  ('min_version', {'min_version': None}),
  ('min_version', {'min_version': 1 << 40}),
  ('temperature', {'sampling': types.Sampling(-0.1, top_k=5)}),
  ('temperature', {'sampling': types.Sampling(float('nan'), top_k=5)}),
  ('temperature', {'sampling': types.Sampling('1', top_k=5)}),
  ('top_p', {'sampling': types.Sampling(top_p=0.0)}),
  ('top_p', {'sampling': types.Sampling(top_p=1.5)}),
  ('min_p', {'sampling': types.Sampling(min_p=1.0)}),
  ('min_p', {'sampling': types.Sampling(min_p=-0.1)}),
  ('top_k', {'sampling': types.Sampling(top_k=K + 1)}),
  ('top_k', {'sampling': types.Sampling(top_k=-1)}),
  ('top_k', {'sampling': types.Sampling(top_k=2.0)}),
  ('top_k', {'sampling': types.Sampling()}),
]


@pytest.fixture(scope='module')
def idle():
  with serving() as made:
    yield made


@pytest.mark.parametrize(
  'field,changes', BAD, ids=[f'{i}-{b[0]}' for i, b in enumerate(BAD)]
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(idle, field, changes):
  with pytest.raises(ValueError, match=field) as caught:
    idle.submit(ask(**changes))
  assert 'want' in str(caught.value) or 'set one' in str(caught.value)
  assert answers(idle, ask('next', max_new=1))[0].token_T.size == 1


def test_filters_are_refused_where_no_sets_are_recorded():
  with serving(cfg=WHOLE) as made, pytest.raises(ValueError, match='top_p'):
    made.submit(ask(sampling=types.Sampling(top_p=0.9)))


def test_filters_without_a_bound_on_the_set_are_refused_at_the_start():
  cfg = dataclasses.replace(FILTERED, top_k=0)
  with pytest.raises(ValueError, match=r'sampler\.top_k'):
    engine.Engine(weights(0), 0, model=MODEL, cfg=cfg, length=LENGTH, swap=lambda: None)


def test_nothing_is_compiled_after_the_start(monkeypatch):
  traces = {'prefill': 0, 'decode': 0}

  def counted(name, function):
    def traced(*args, **kwargs):
      traces[name] += 1
      return function(*args, **kwargs)

    return traced

  for name in traces:
    monkeypatch.setattr(decode, name, counted(name, getattr(decode, name)))
  # Another number of steps, so that the programs are not the shared ones.
  cfg = dataclasses.replace(FILTERED, decode_steps=3)
  swap = Publishing(after=40)
  with serving(cfg=cfg, swap=swap) as made:
    swap.made = made
    assert traces == {'prefill': 1, 'decode': 1}
    first = ask('a')
    (a,) = answers(made, first)
    answers(made, next_turn(first, a), ask('b', token_T=prompt(1), max_new=1))
    answers(made, *(ask(str(i), sampling=s) for i, s in enumerate(SETTINGS)))
    answers(made, ask('greedy', sampling=types.Sampling(0.0), stop_ids=(3,)))
    assert made.version == 1
  assert traces == {'prefill': 1, 'decode': 1}
