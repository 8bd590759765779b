"""The entropy bench: its task, its two effects exactly, and its verdict."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import bandit, entropy
from swe17.ops import advantage, logprob

TASK = bandit.Task(prompts=2, turns=3, vocab=24)
KEY = jax.random.key(3)


@functools.cache
def drawn(arm: str, baseline: str = 'mean') -> dict[str, np.ndarray]:
  one = functools.partial(
    bandit.sample, task=TASK, arm=bandit.ARMS[arm], baseline=baseline
  )
  batch = jax.jit(one)(KEY, bandit.initial(KEY, TASK))
  return {name: np.asarray(value) for name, value in batch.items()}


@dataclasses.dataclass(frozen=True)
class Command:
  """The bench, run once for all tests of its outcome."""

  code: int
  out: str
  err: str
  records: entropy.Records
  figure: bytes


@pytest.fixture(scope='module')
def command(tmp_path_factory) -> Command:
  path = tmp_path_factory.mktemp('bench') / 'entropy.png'
  kept, measure = [], entropy.measure

  def keep(*args):
    kept.append(measure(*args))
    return kept[0]

  out, err = io.StringIO(), io.StringIO()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(entropy, 'measure', keep)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = entropy.main(['--seeds=5', '--steps=200', f'--figure={path}'])
  return Command(code, out.getvalue(), err.getvalue(), kept[0], path.read_bytes())


def mean_score(z_V: np.ndarray, kept: list[int], replay: bool) -> np.ndarray:
  """E over a ~ q of the gradient of the learner's log-probability, float64 [V]."""
  q = np.exp(z_V[kept] - z_V[kept].max())
  q /= q.sum()

  def logp(z_V: jax.Array, token: jax.Array) -> jax.Array:
    scores = logprob.score(
      z_V[None, None],
      token[None, None],
      jnp.array([[kept]]),
      jnp.ones((1, 1)),
      replay=replay,
    )
    return scores.logp_BT[0, 0]

  grad = jax.jit(jax.vmap(jax.grad(logp), in_axes=(None, 0)))
  grads_KV = grad(jnp.asarray(z_V, jnp.float32), jnp.asarray(kept))
  return q @ np.asarray(grads_KV, np.float64)


def test_without_replay_the_mean_score_is_q_minus_p_and_with_it_zero():
  rng = np.random.default_rng(0)
  z_V, kept = rng.normal(size=12), [0, 3, 7, 8]
  p = np.exp(z_V) / np.exp(z_V).sum()
  q = np.zeros_like(p)
  q[kept] = p[kept] / p[kept].sum()
  np.testing.assert_allclose(mean_score(z_V, kept, False), q - p, atol=1e-6)
  np.testing.assert_allclose(mean_score(z_V, kept, True), 0, atol=1e-6)


def test_a_bad_token_ends_the_episode_and_takes_its_reward():
  batch = drawn('none')
  G = TASK.group
  for row in range(TASK.prompts * G):
    mask, token = batch['mask_BT'][row], batch['token_BT'][row]
    length = mask.sum()
    assert mask[:length].all() and mask[0]  # it never starts again
    assert (token[: length - 1] < TASK.good).all()  # it went on after good ones only
    if batch['reward_PG'][row // G, row % G]:
      assert length == TASK.turns and (token < TASK.good).all()
  assert 0 < batch['reward_PG'].mean() < 1


def test_chance_alone_ends_episodes_at_its_rate():
  sure = bandit.Task(prompts=64, turns=1, vocab=24, bad_mass=1e-9, tail_mass=1e-9)
  one = functools.partial(
    bandit.sample, task=sure, arm=bandit.ARMS['none'], baseline='mean'
  )
  batch = jax.jit(one)(KEY, bandit.initial(KEY, sure))
  # 512 draws at .85: four standard deviations are .063.
  assert abs(float(batch['reward_PG'].mean()) - (1 - sure.fail)) < 0.063


@pytest.mark.parametrize('baseline', bandit.BASELINES)
def test_advantages_are_those_of_ops(baseline):
  batch = drawn('replay', baseline)
  length = batch['mask_BT'].sum(1).reshape(TASK.prompts, TASK.group)
  adv = batch['adv_BT'][:, 0].reshape(length.shape)
  for p in range(TASK.prompts):
    want = advantage.advantages(
      batch['reward_PG'][p], length[p], advantage.BASELINES[baseline]
    )
    np.testing.assert_allclose(adv[p], want, atol=1e-6)


def test_sets_are_recorded_where_top_p_is_on_and_hold_the_token():
  assert (drawn('none')['kept_ids_BTK'] == -1).all()
  batch = drawn('naive')
  inside = batch['kept_ids_BTK'] == batch['token_BT'][:, :, None]
  assert (inside.sum(-1) == 1).all()
  size = (batch['kept_ids_BTK'] >= 0).sum(-1)
  assert 1 <= size.min() < size.max() < TASK.vocab


def test_arms_start_from_the_same_logits(command):
  start = {arm: record['entropy'][:, 0] for arm, record in command.records.items()}
  for arm in bandit.ARMS:
    np.testing.assert_array_equal(start[arm], start['none'])
  assert len(set(start['none'].tolist())) == 5  # the seeds do differ
  assert bandit.ARMS['naive'].top_p == bandit.ARMS['replay'].top_p


def test_with_equal_weights_replay_has_no_mismatch_and_naive_the_kept_mass():
  theta_PTV = bandit.initial(KEY, TASK)
  found = {}
  for arm in ('replay', 'naive'):
    one = functools.partial(
      bandit._loss, task=TASK, arm=bandit.ARMS[arm], cfg=bandit.Train()
    )
    _, found[arm] = jax.jit(one)(theta_PTV, drawn(arm))
  replay, naive = found['replay'], found['naive']
  assert replay['k3'].max() < 1e-9
  np.testing.assert_allclose(replay['ratio_mean'], 1, atol=1e-5)
  # A set of top-p .9 holds .9 of the mass or more, and each ratio is its set's mass.
  m = np.asarray(naive['ratio_mean'])
  assert m.min() >= 0.9 - 1e-5 and m.max() < 1
  # k3 is convex in the log-ratio: at least that of a constant ratio m.
  assert (np.asarray(naive['k3']) >= m - 1 - np.log(m) - 1e-6).all()


def test_the_order_is_none_naive_replay_and_the_mismatch_bounded(command):
  found = entropy.summary(command.records)
  assert entropy.verdict(found) == [] and command.code == 0, command.err
  assert max(found['replay']['k3']) < min(found['naive']['k3'])


def test_the_verdict_names_what_is_wrong():
  good = {'slope': [-0.001, -0.0012], 'k3': [1e-3, 1e-3], 'ratio': [1.0, 1.0]}
  bad = {**good, 'slope': [-0.01, -0.0101]}
  fine = {'none': bad, 'naive': bad, 'replay': good}
  assert entropy.verdict(fine) == []
  for arm in ('none', 'naive'):
    (said,) = entropy.verdict({**fine, arm: good})
    assert f"not flatter than {arm}'s" in said
  (said,) = entropy.verdict({**fine, 'replay': {**good, 'k3': [1e-3, 0.06]}})
  assert 'k3 is 0.06' in said
  (said,) = entropy.verdict({**fine, 'replay': {**good, 'k3': [1e-3, np.nan]}})
  assert 'k3 is' in said


def test_the_slope_is_the_median_over_pairs_and_ignores_a_wild_step():
  rng = np.random.default_rng(0)
  y = 2 - 0.01 * np.arange(30) + 0.001 * rng.normal(size=30)
  pairs = [(y[j] - y[i]) / (j - i) for i, j in itertools.combinations(range(30), 2)]
  assert entropy.slope(y) == pytest.approx(float(np.median(pairs)), abs=1e-15)
  y[7] = 50.0
  assert entropy.slope(y) == pytest.approx(-0.01, abs=1e-3)


def test_the_command_ends_with_json_and_draws_its_figure(command):
  last = json.loads(command.out.splitlines()[-1])
  assert last.keys() == {'slope', 'mismatch_k3', 'seeds'} and last['seeds'] == 5
  found = entropy.summary(command.records)
  for arm in bandit.ARMS:
    assert last['slope'][arm] == pytest.approx(np.mean(found[arm]['slope']), rel=1e-3)
    assert last['mismatch_k3'][arm] == pytest.approx(
      np.mean(found[arm]['k3']), rel=1e-3
    )
  assert command.figure.startswith(b'\x89PNG')


def test_bad_flags_and_baselines_are_refused(capsys):
  assert entropy.main(['--seeds=1']) == 2
  assert 'seeds' in capsys.readouterr().err
  with pytest.raises(ValueError, match='baseline'):
    bandit.train(KEY, TASK, bandit.ARMS['none'], bandit.Train(baseline='none'))
