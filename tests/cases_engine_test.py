"""CASES 1.9 and 9.2 on an engine: keys of a group, and which row is whose token.

9.2, row i of what is replayed belongs to input token i: routing is by hash, token t
goes to experts t mod 4 and (t + 1) mod 4. What the engine feeds is read off its own
dispatches, what the learner is fed off its own packed batch; a route is recorded at the
one and replayed at the other.
"""

import collections
from collections.abc import Iterator
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import episode
from swe17.learner import batching, packing, summary
from swe17.ops import routing
from swe17.sampler import engine
from tests import fixtures
from tests import sampler_engine_test as engines

E, K = 4, 2
Rows = dict[str, dict[int, int]]  # session -> position -> the token fed there


def experts(token: np.ndarray) -> np.ndarray:
  """The routes of tokens, int32 [..., K]."""
  token = np.asarray(token, np.int32)
  return np.stack([token % E, (token + 1) % E], axis=-1)


def watch(made: engine.Engine) -> Rows:
  """What every later dispatch feeds, by session and position."""
  rows: Rows = collections.defaultdict(dict)
  device = made._device
  prefill, decode = device.prefill_program, device.decode_program

  def session(page: int) -> str:
    """Of the slot that writes to a page: it alone has it."""
    (slot,) = [
      slot for slot in made._scheduler.running if page in [p.id for p in slot.row.pages]
    ]
    return slot.job.request.session

  def watched_prefill(params, cache, token_BT, position_BT, table_BJ):
    for r, t in zip(*np.nonzero(position_BT < engines.LENGTH), strict=True):
      position = int(position_BT[r, t])
      name = session(table_BJ[r, position // engines.WHOLE.page])
      rows[name][position] = int(token_BT[r, t])
    return prefill(params, cache, token_BT, position_BT, table_BJ)

  def watched_decode(params, cache, slots):
    before = jax.device_get(slots)
    cache, after, draws = decode(params, cache, slots)
    token_TB, position_B = np.asarray(draws.token_B), np.asarray(after.position_B)
    for b in np.flatnonzero(before.left_B):
      start = int(before.position_B[b])
      n = int(position_B[b]) - start
      fed = [before.token_B[b], *token_TB[: max(n - 1, 0), b]][:n]
      name = session(before.table_BJ[b, start // engines.WHOLE.page])
      rows[name] |= {start + i: int(x) for i, x in enumerate(fed)}
    return cache, after, draws

  device.prefill_program, device.decode_program = watched_prefill, watched_decode
  return rows


@contextlib.contextmanager
def serving() -> Iterator[tuple[engine.Engine, Rows]]:
  with engines.serving(cfg=engines.WHOLE) as made:
    yield made, watch(made)


def ask(session: str, token_T: np.ndarray, new: int, **more) -> types.GenerateRequest:
  sampling = engines.WHOLE.sampling
  return engines.ask(session, token_T=token_T, max_new=new, sampling=sampling, **more)


compiled_once = engines.compiled_once


def segment(token_T: np.ndarray, mask: list[bool], turn_T: list[int]) -> types.Segment:
  n = token_T.size
  zero_T = np.zeros(n, np.float32)
  return types.Segment(
    token_T=token_T,
    mask_T=np.array(mask),
    mu_logp_T=zero_T,
    entropy_T=zero_T,
    temperature_T=zero_T + 1,
    version_T=np.zeros(n, np.int32),
    turn_T=np.array(turn_T, np.int32),
    kept=types.KeptSets(np.zeros(n + 1, np.int32), np.zeros(0, np.int32)),
  )


def talk(made: engine.Engine, session: str, *turns: tuple[int, int]) -> types.Segment:
  """A segment of turns (tokens read, tokens drawn), each a request to the engine."""
  token_T, mask, turn_T = np.zeros(0, np.int32), [], []
  for i, (read, new) in enumerate(turns):
    token_T = np.append(token_T, engines.prompt(read, 10 * i + len(session)))
    (result,) = engines.answers(made, ask(session, token_T.astype(np.int32), new))
    token_T = np.append(token_T, result.token_T).astype(np.int32)
    mask += [False] * read + [True] * new
    turn_T += [i] * (read + new)
  return segment(token_T, mask, turn_T)


def recorded(rows: dict[int, int]) -> np.ndarray:
  """A session's routes in order of position, int32 [rows, K]; none may be missing."""
  assert sorted(rows) == list(range(len(rows)))
  return experts(np.array([rows[i] for i in range(len(rows))]))


def test_an_engine_feeds_every_token_but_the_last_drawn_at_its_own_place():
  with serving() as (made, rows):
    one = talk(made, 'a', (7, 5))
    assert len(rows['a']) == 7 + 5 - 1  # the missing tail
    np.testing.assert_array_equal(recorded(rows['a']), experts(one.token_T[:-1]))
    before = dict(rows['a'])
    rows['a'].clear()
    two = talk(made, 'bb', (7, 5), (3, 4))
    np.testing.assert_array_equal(recorded(rows['bb']), experts(two.token_T[:-1]))
    assert one.token_T[:7].tolist() == [before[i] for i in range(7)]


def test_a_next_turn_that_hits_the_cache_feeds_the_missing_tail_and_no_row_twice():
  with serving() as (made, rows):
    first = ask('a', engines.prompt(7), 5)
    (result,) = engines.answers(made, first)
    context = np.concatenate([first.token_T, result.token_T, engines.prompt(3, 1)])
    old = dict(rows['a'])
    rows['a'].clear()
    (more,) = engines.answers(made, ask('a', context.astype(np.int32), 4))
    assert sorted(rows['a']) == list(range(11, 7 + 5 + 3 + 4 - 1))
    assert rows['a'][11] == int(result.token_T[-1])
    fed = old | rows['a']
    whole = np.concatenate([context, more.token_T])
    np.testing.assert_array_equal(recorded(fed), experts(whole[:-1]))


@pytest.fixture(scope='module')
def packed():
  """(batch, routes [B, T, K] by segment): two episodes, one of them compacted."""
  with serving() as (made, rows):
    names = {
      'a': ((7, 5), (3, 4), (2, 6)),  # turns that each find their prefix cached
      'a.1': ((9, 8),),  # the same episode after its compaction
      'bb': ((12, 1),),
    }
    segments = [talk(made, name, *turns) for name, turns in names.items()]
    routes = [recorded(rows[name]) for name in names]
  items = [batching.Item(s, 1.0) for s in segments]
  cfg = config.Batch(row_length=40, micro_rows=3)
  batch = batching.fill(items, micro=1, cfg=cfg, K=1, denominator=1.0)
  placed = np.full((3, 40, K), -1, np.int32)
  order = sorted(range(3), key=lambda i: (-routes[i].shape[0], i))
  layout = packing.pack([r.shape[0] for r in routes], 40)
  assert sorted(i for row in layout for i in row) == sorted(order)
  for r, row in enumerate(layout):
    at = 0
    for i in row:
      placed[r, at : at + routes[i].shape[0]] = routes[i]
      at += routes[i].shape[0]
  return batch, placed


def replay(batch, placed: np.ndarray) -> routing.Routes:
  token = batch.token_MBT[0].reshape(-1)
  logit = np.random.default_rng(0).normal(size=(token.size, E)).astype(np.float32)
  flat = jnp.asarray(placed.reshape(-1, K))
  return routing.softmax(jnp.asarray(logit), K, renormalise=True, recorded_TK=flat)


def test_recorded_routes_are_those_of_the_learners_input_tokens(packed):
  batch, placed = packed
  used = batch.segment_MBT[0].reshape(-1) > 0
  got = replay(batch, placed)
  want = experts(batch.token_MBT[0].reshape(-1))
  np.testing.assert_array_equal(np.asarray(got.ids_TK)[used], want[used])
  # As many rows as inputs: all of the real ones are replayed, and only they.
  np.testing.assert_array_equal(got.own_T, ~used)
  assert (batch.mask_MBT[0].reshape(-1) & ~used).sum() == 0


@pytest.mark.parametrize('shift', [1, -1])
def test_routes_off_by_one_are_those_of_other_tokens(packed, shift):
  batch, placed = packed
  on = batch.mask_MBT[0].reshape(-1)
  got = replay(batch, np.roll(placed, shift, axis=1))
  want = experts(batch.token_MBT[0].reshape(-1))
  assert (np.asarray(got.ids_TK)[on] != want[on]).any()


@pytest.mark.parametrize('mixed', [True, False])
def test_no_group_of_a_uniform_model_is_all_alike_unless_its_key_is_the_groups(mixed):
  # One seed for the run: it is mixed with group and member before it draws.
  flat = jax.tree.map(jnp.zeros_like, engines.weights(0))
  prompt, members = engines.prompt(9), []
  with engines.serving(flat, engines.WHOLE) as made:
    asked = [
      ask(f's{m}', prompt, 16, key=episode.draw_key(7, '0-a.0', m if mixed else 0, 0))
      for m in range(8)
    ]
    for m, result in enumerate(engines.answers(made, *asked)):
      token_T = np.concatenate([prompt, result.token_T])
      drawn = segment(token_T, [False] * 9 + [True] * 16, [0] * 25)
      members.append(fixtures.episode(drawn, float(m % 2), member=m))
  group = types.Group('0-a.0', 0, 'task/0', 'unit', tuple(members))
  got = summary.of_groups([group], [0], top_k=0)
  assert (got['identical_share'], got['identical_count']) == (0.0 if mixed else 1.0, 1)
