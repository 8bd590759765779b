"""Muon and AdamW against float64 references, and the table that assigns them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swe17 import config, config_model
from swe17.learner import optimizer
from swe17.model import params as p
from tests import fixtures

CFG = config.Optim(lr=0.01, warmup=0)
# Leaf name -> (axes of the matrix's rows, axes of its columns); axis 0 is the layer, or
# how far back the token is.
MATRICES = {
  'wq_NDQH': ((1,), (2, 3)),
  'wk_NDCH': ((1,), (2, 3)),
  'wv_NDCH': ((1,), (2, 3)),
  'wo_NQHD': ((1, 2), (3,)),
  'wg_NDF': ((1,), (2,)),
  'wu_NDF': ((1,), (2,)),
  'wd_NFD': ((1,), (2,)),
  'prev_JDD': ((1,), (2,)),
}


def newton_schulz64(x: np.ndarray) -> np.ndarray:
  """arXiv:2502.16982: five steps of the quintic from X = M / |M|_F."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = x / np.linalg.norm(x)
  for _ in range(5):
    s = x @ x.T
    x = a * x + (b * s + c * s @ s) @ x
  return x


def muon64(grads: list[np.ndarray], cfg: config.Optim) -> np.ndarray:
  """The update of one matrix after the last of `grads`, Nesterov as in optax."""
  beta, m = cfg.muon_beta, np.zeros(grads[0].shape)
  for t, g in enumerate(np.float64(grads), 1):
    m = beta * m + (1 - beta) * g
    ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
  scale = cfg.consistent_rms * np.sqrt(max(ahead.shape))
  return -cfg.lr * scale * newton_schulz64(ahead)


def adamw64(w: np.ndarray, grads: list[np.ndarray], cfg: config.Optim) -> np.ndarray:
  """The update after the last of `grads`; `w` are the weights before it."""
  m = v = 0.0
  for t, g in enumerate(np.float64(grads), 1):
    m = cfg.adam_b1 * m + (1 - cfg.adam_b1) * g
    v = cfg.adam_b2 * v + (1 - cfg.adam_b2) * g**2
    step = (m / (1 - cfg.adam_b1**t)) / (
      np.sqrt(v / (1 - cfg.adam_b2**t)) + cfg.adam_eps
    )
  return -cfg.lr * (step + cfg.weight_decay * np.float64(w))


def random_like(tree: p.Params, seed: int) -> p.Params:
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), tree)


def make(cfg: config.Optim = CFG):
  tx = optimizer.make(cfg, optimizer.schedule(cfg))
  return tx, jax.jit(tx.update)


TX, UPDATE = make()
PARAMS = fixtures.params()
GRADS = [random_like(PARAMS, i) for i in range(3)]


def steps(grads, update=UPDATE, tx=TX, params=PARAMS) -> p.Params:
  """The update after the last of `grads`, weights held still."""
  state = tx.init(params)
  for grad in grads:
    updates, state = update(grad, state, params)
  return updates


def leaf(tree: p.Params, name: str) -> np.ndarray:
  """The leaf of this name, wherever it stands."""
  found = {
    optimizer.name(path).rpartition('/')[2]: x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }
  return np.asarray(found[name])


def with_leaf(tree: p.Params, name: str, x: np.ndarray) -> p.Params:
  """The tree with another array at the leaf of this name."""

  def change(path: tuple, old: np.ndarray) -> np.ndarray:
    return x if optimizer.name(path).rpartition('/')[2] == name else old

  return jax.tree_util.tree_map_with_path(change, tree)


def matrices(tree: p.Params, name: str) -> np.ndarray:
  """A leaf as [N, rows, columns]."""
  x, (rows, _) = leaf(tree, name), MATRICES[name]
  return x.reshape(x.shape[0], np.prod([x.shape[i] for i in rows]), -1)


def families() -> list[config.Model]:
  """One of each kind, so that together they have every parameter there is."""
  small = {'layers': 2, 'width': 16, 'ffn': 8, 'heads': 2, 'head_dim': 8}
  small |= {'rotary_dim': 4, 'kv_heads': 2, 'ngram': 1, 'tied': False}
  moe = config_model.Moe(experts=4, ffn=8, shared=1, first_dense=1, router='sigmoid')
  latent = config_model.Mla(q_rank=8, kv_rank=8, v_dim=4)
  full = {**small, 'attention': 'mla', 'moe': moe}
  return [
    config.Model(**{**small, 'ngram': 2, 'bias': True, 'qk_norm': True}),
    config.Model(**{**small, 'bias': True, 'qk_norm': True}, moe=moe),
    config.Model(**full, mla=latent),
    config.Model(**full, mla=dataclasses.replace(latent, q_rank=0)),
  ]


def test_every_parameter_has_a_row_and_every_row_a_parameter():
  seen, lora = set(), config_model.Lora(rank=2)
  for cfg in families():
    tree = p.abstract(dataclasses.replace(cfg, lora=lora), 31)
    seen |= {optimizer.name(x) for x, _ in jax.tree_util.tree_leaves_with_path(tree)}
  assert seen <= set(optimizer.TABLE)

  def kind(name: str) -> str:  # the rows are the same in both stacks
    return name.removeprefix('dense/').removeprefix('moe/')

  assert {kind(name) for name in seen} == {kind(name) for name in optimizer.TABLE}


def test_every_family_takes_a_step_and_only_matrices_get_muon():
  for cfg in families():
    tree = p.init(p.abstract(cfg, 31), jax.random.key(0))
    tx, update = make(fixtures.OPTIM)
    updates = steps([random_like(tree, 0)], update, tx, tree)
    assert all(leaf.any() for leaf in fixtures.leaves(updates))
    labels = dict(jax.tree_util.tree_leaves_with_path(optimizer.labels(tree)))
    for path, label in labels.items():
      name = optimizer.name(path).rpartition('/')[2]
      assert (label == 'muon') == name.startswith(('w', 'prev')), name


def test_embedding_and_norms_get_adamw_and_every_matrix_muon():
  labels = optimizer.labels(PARAMS)
  assert (labels.embed_VD, labels.norm_D) == ('adamw', 'adamw')
  got = {
    optimizer.name(path).rpartition('/')[2]: label
    for path, label in jax.tree_util.tree_leaves_with_path(labels)
  }
  assert {k for k, v in got.items() if v == 'muon'} == set(MATRICES)
  rest = {'embed_VD', 'norm_D', 'attn_norm_ND', 'mlp_norm_ND'}
  assert {k for k, v in got.items() if v == 'adamw'} == rest


@pytest.mark.parametrize('ngram', [1, 2, 4])
def test_the_embedding_of_any_span_has_its_matrices_in_the_table(ngram):
  tree = p.abstract(dataclasses.replace(fixtures.MODEL, ngram=ngram), fixtures.VOCAB)
  assert optimizer.labels(tree).prev_JDD == ('muon' if ngram > 1 else None)


def test_a_model_without_tokens_before_is_updated_all_the_same():
  cfg = dataclasses.replace(fixtures.MODEL, layers=1, width=8, ffn=8, ngram=1)
  tree = fixtures.params(cfg=cfg)
  tx, update = make(fixtures.OPTIM)
  updates = steps([random_like(tree, 0)], update, tx, tree)
  assert updates.prev_JDD is None
  assert all(leaf.any() for leaf in fixtures.leaves(updates))


def test_an_unknown_parameter_refuses_to_start_and_is_named():
  with pytest.raises(ValueError, match="'layers/w_new' is not in the optimiser table"):
    TX.init({'layers': {'w_new': jnp.ones((2, 3, 4))}})


@pytest.mark.parametrize('name', MATRICES)
def test_muon_equals_the_paper_in_float64_for_each_layer_of_a_stack(name):
  # Gradients differ from step to step, shapes are tall (wo, wd) and wide (wq, wg).
  got, given = matrices(steps(GRADS), name), [matrices(g, name) for g in GRADS]
  for n in range(got.shape[0]):
    want = muon64([g[n] for g in given], CFG)
    np.testing.assert_allclose(got[n], want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize('name', MATRICES)
def test_a_muon_update_has_a_flat_spectrum_and_the_rms_of_the_setting(name):
  for matrix in matrices(steps(GRADS), name):
    scale = CFG.lr * CFG.consistent_rms * np.sqrt(max(matrix.shape))
    values = np.linalg.svd(matrix / scale, compute_uv=False)
    assert values.max() < 1.25
    # A square random matrix has singular values near 0, which 5 steps can't all lift.
    square = matrix.shape[0] == matrix.shape[1]
    assert (np.median(values) if square else values.min()) > 0.6
    rms = np.sqrt((matrix**2).mean()) / (CFG.lr * CFG.consistent_rms)
    assert 0.8 < rms < 1.15


def test_a_rotated_problem_gives_the_rotated_update():
  rng = np.random.default_rng(0)
  D, F = leaf(GRADS[0], 'wg_NDF').shape[1:]
  u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (D, F))

  def turned(tree: p.Params) -> p.Params:
    x = np.float32(u @ leaf(tree, 'wg_NDF') @ v.T)
    return with_leaf(tree, 'wg_NDF', x)

  got = leaf(steps([turned(g) for g in GRADS]), 'wg_NDF')
  want = u @ np.float64(leaf(steps(GRADS), 'wg_NDF')) @ v.T
  np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize('stack', [False, True])
def test_tall_and_wide_matrices_have_the_same_scale(stack):
  # (in, out) = (64, 16) and (16, 64): .2 sqrt(64) both, not sqrt(out / in).
  table = {'tall': optimizer.Matrix((0,), (1,)), 'wide': optimizer.Matrix((0,), (1,))}
  cfg = dataclasses.replace(CFG, muon_stack=stack)
  tx = optimizer.make(cfg, optimizer.schedule(cfg), table)
  rng = np.random.default_rng(0)
  tall = [np.float32(rng.normal(size=(64, 16))) for _ in range(2)]
  state = tx.init({'tall': tall[0], 'wide': tall[0].T})
  for g in tall:
    got, state = tx.update({'tall': g, 'wide': g.T}, state, {'tall': g, 'wide': g.T})
  want = muon64(tall, CFG)
  np.testing.assert_allclose(got['tall'], want, atol=2e-4 * np.abs(want).max())
  np.testing.assert_allclose(got['wide'], want.T, atol=2e-4 * np.abs(want).max())
  values = np.linalg.svd(np.asarray(got['tall']), compute_uv=False)
  assert (np.abs(values / (CFG.lr * 0.2 * 8) - 0.95) < 0.3).all()


def test_a_stack_of_equal_shapes_gives_what_one_matrix_at_a_time_gives():
  tx, update = make(dataclasses.replace(CFG, muon_stack=True))
  a, b = steps(GRADS, update, tx), steps(GRADS)
  for x, y in zip(fixtures.leaves(a), fixtures.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


# Leaf -> (its shape [D, Q, H] or [Q, H, D] put as heads x rows x columns).
HEADS = {
  'wq_NDQH': (0, 2, 1, 3),
  'wk_NDCH': (0, 2, 1, 3),
  'wv_NDCH': (0, 2, 1, 3),
  'wo_NQHD': (0, 1, 2, 3),
}


@pytest.mark.parametrize('stack', [False, True])
def test_per_head_every_head_is_a_matrix_of_its_own(stack):
  tx, update = make(dataclasses.replace(CFG, muon_per_head=True, muon_stack=stack))
  got = steps(GRADS, update, tx)
  for name, order in HEADS.items():
    parts = [leaf(g, name).transpose(order) for g in GRADS]
    mine = leaf(got, name).transpose(order)
    for n, h in np.ndindex(mine.shape[:2]):
      want = muon64([x[n, h] for x in parts], CFG)
      np.testing.assert_allclose(mine[n, h], want, atol=2e-4 * np.abs(want).max())
  a, b = leaf(got, 'wg_NDF'), leaf(steps(GRADS), 'wg_NDF')
  np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize('stack', [False, True])
def test_every_expert_of_every_layer_is_a_matrix_of_its_own(stack):
  table = {
    'in_NEDF': optimizer.Matrix(rows=(2,), columns=(3,)),
    'out_NEFD': optimizer.Matrix(rows=(2,), columns=(3,)),
    'router_NDE': optimizer.ADAMW,
  }
  shapes = {
    'in_NEDF': (2, 3, 8, 12),
    'out_NEFD': (2, 3, 12, 8),
    'router_NDE': (2, 8, 3),
  }
  rng = np.random.default_rng(0)
  grads = [
    {k: np.float32(rng.normal(size=s)) for k, s in shapes.items()} for _ in range(3)
  ]
  cfg = dataclasses.replace(CFG, muon_stack=stack)
  tx = optimizer.make(cfg, optimizer.schedule(cfg), table)
  state, update = tx.init(grads[0]), jax.jit(tx.update)
  for g in grads:
    got, state = update(g, state, grads[0])
  for name in ('in_NEDF', 'out_NEFD'):
    for n, e in np.ndindex(2, 3):
      want = muon64([g[name][n, e] for g in grads], CFG)
      np.testing.assert_allclose(
        got[name][n, e], want, atol=2e-4 * np.abs(want).max(), err_msg=f'{name} {n} {e}'
      )
  want = adamw64(grads[0]['router_NDE'], [g['router_NDE'] for g in grads], CFG)
  np.testing.assert_allclose(got['router_NDE'], want, rtol=1e-4, atol=1e-9)


def test_an_expert_without_a_gradient_does_not_move():
  x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
  x[1] = 0
  got = np.asarray(optimizer.newton_schulz(jnp.asarray(x), 5))
  assert not got[1].any()
  assert np.isfinite(got).all()


@pytest.mark.parametrize('size', [1e-30, 1e-20, 1e20])
def test_a_gradient_of_any_size_has_the_same_factor(size):
  x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
  want = newton_schulz64(np.float64(x))
  got = optimizer.newton_schulz(jnp.asarray(x * np.float32(size)), 5)
  np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('name', ['embed_VD', 'norm_D', 'prev_JDD'])
def test_masters_that_are_not_float32_refuse_to_start_under_muon_and_adamw(name, dtype):
  low = dataclasses.replace(PARAMS, **{name: getattr(PARAMS, name).astype(dtype)})
  with pytest.raises(ValueError, match=f"'{name}': got a .*float16 master"):
    TX.init(low)


def test_the_state_of_float32_masters_is_float32():
  kinds = {x.dtype for x in jax.tree.leaves(TX.init(PARAMS)) if x.ndim}
  assert kinds == {jnp.dtype('float32')}


def test_a_row_that_does_not_fit_its_parameter_is_refused():
  table = {'w': optimizer.Matrix(rows=(1,), columns=(2,))}
  tx = optimizer.make(CFG, optimizer.schedule(CFG), table)
  with pytest.raises(ValueError, match="'w': got shape"):
    tx.init({'w': jnp.ones((2, 3))})


def test_the_size_of_a_muon_update_does_not_depend_on_that_of_the_gradient():
  small = [jax.tree.map(lambda g: g * np.float32(1e-4), g) for g in GRADS]
  a, b = leaf(steps(GRADS), 'wq_NDQH'), leaf(steps(small), 'wq_NDQH')
  np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(a).max())


def test_layers_of_a_stack_do_not_mix():
  x = np.array(leaf(GRADS[0], 'wd_NFD'))
  x[1] = 0
  got = leaf(steps([with_leaf(GRADS[0], 'wd_NFD', x)]), 'wd_NFD')
  assert not np.asarray(got[1]).any()
  np.testing.assert_allclose(got[0], leaf(steps(GRADS[:1]), 'wd_NFD')[0], rtol=1e-5)


def test_matrices_of_the_tokens_before_do_not_mix():
  x = np.array(GRADS[0].prev_JDD)
  x[1] = 0
  got = steps([dataclasses.replace(GRADS[0], prev_JDD=x)]).prev_JDD
  assert not np.asarray(got[1]).any()
  np.testing.assert_allclose(got[0], steps(GRADS[:1]).prev_JDD[0], rtol=1e-5)


@pytest.mark.parametrize('path', ['embed_VD', 'norm_D', 'attn_norm_ND', 'mlp_norm_ND'])
def test_the_rest_gets_true_adamw_in_float64(path):
  want = adamw64(leaf(PARAMS, path), [leaf(g, path) for g in GRADS], CFG)
  np.testing.assert_allclose(leaf(steps(GRADS), path), want, rtol=1e-4, atol=1e-9)


def test_weight_decay_is_decoupled_and_acts_on_every_leaf():
  cfg = dataclasses.replace(CFG, weight_decay=0.1)
  tx, update = make(cfg)
  got, plain = steps(GRADS, update, tx), steps(GRADS)
  for a, b, w in zip(*map(fixtures.leaves, (got, plain, PARAMS)), strict=True):
    np.testing.assert_allclose(a - b, -cfg.lr * 0.1 * w, atol=1e-6)


def test_a_zero_gradient_leaves_the_weights_bit_equal():
  zero = jax.tree.map(np.zeros_like, GRADS[0])
  moved = optax.apply_updates(PARAMS, steps([zero, zero]))
  assert fixtures.same_bits(moved, PARAMS)


@pytest.mark.parametrize(
  'warmup, want', [(0, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (4, [0.25, 0.5, 0.75, 1, 1])]
)
def test_the_learning_rate_rises_in_equal_steps_to_its_value(warmup, want):
  fn = optimizer.schedule(dataclasses.replace(CFG, warmup=warmup))
  got = [float(fn(i)) for i in range(len(want))]
  np.testing.assert_allclose(got, 0.01 * np.array(want), rtol=1e-6)


def test_the_schedule_scales_both_halves():
  cfg = dataclasses.replace(CFG, warmup=2)
  tx, update = make(cfg)
  first, constant = steps(GRADS[:1], update, tx), steps(GRADS[:1])
  for a, b in zip(fixtures.leaves(first), fixtures.leaves(constant), strict=True):
    np.testing.assert_allclose(a, b / 2, rtol=1e-5)


def test_rms_is_over_all_elements():
  tree = {'a': jnp.full(3, 2.0), 'b': jnp.zeros((1, 1))}
  assert float(optimizer.rms(tree)) == pytest.approx(np.sqrt(12 / 4))
