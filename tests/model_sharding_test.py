"""The table of logical axes: which mesh axes an array takes, and in what order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.learner import optimizer
from swe17.model import params as p
from swe17.model import sharding

P = jax.P
MOE = config.Model(
  attention='mla',
  ngram=1,
  layers=3,
  tied=False,
  mla=config.config_model.Mla(q_rank=64),
  moe=config.config_model.Moe(experts=8, shared=1, first_dense=1, router='sigmoid'),
)
ON = jax.sharding.AbstractMesh(
  (1, 2, 4, 1, 2),
  sharding.AXES,
  axis_types=(jax.sharding.AxisType.Auto,) * len(sharding.AXES),
)
SIZES = dict(ON.shape)
X = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
  'names, shape, want',
  [
    # An embedding: vocabulary over tensor, width over the other two.
    ('vocab embed', (512, 64), P('tensor', ('fsdp', 'expert'))),
    # Experts go first, wherever they stand; width takes what is left.
    (
      'layer experts embed expert_ffn',
      (3, 8, 64, 32),
      P(None, 'expert', 'fsdp', 'tensor'),
    ),
    ('embed experts', (64, 8), P('fsdp', 'expert')),
    # A dimension takes the axes that divide it: 2 does, 2 * 4 does not.
    ('layer embed ffn', (3, 6, 64), P(None, 'fsdp', 'tensor')),
    ('embed', (7,), P(None)),
    ('vocab embed', (511, 64), P(None, ('fsdp', 'expert'))),
    # Used once: of two like dimensions the first is split.
    ('ngram embed embed', (1, 64, 64), P(None, ('fsdp', 'expert'), None)),
    ('heads kv', (4, 4), P('tensor', None)),
    ('layer layer', (8, 8), P(None, None)),
    ('batch time', (8, 64), P(('fsdp', 'expert'), None)),
    ('matrices layer', (16, 3), P(('fsdp', 'expert', 'tensor'), None)),
    ('expert_matrices layer', (16, 3), P(('expert', 'fsdp', 'tensor'), None)),
  ],
)
def test_a_spec_takes_axes_once_in_order_where_they_divide(names, shape, want):
  assert sharding.spec(names.split(), shape, SIZES) == want


def test_a_mesh_has_every_axis_and_as_many_devices_as_their_product():
  found = sharding.mesh({'fsdp': 1}, jax.devices()[:1])
  assert dict(found.shape) == dict.fromkeys(sharding.AXES, 1)
  assert set(found.axis_types) == {jax.sharding.AxisType.Auto}
  for sizes in ({'fsdp': 2}, {'rows': 1}):
    with pytest.raises(ValueError, match='want axes among'):
      sharding.mesh(sizes, jax.devices()[:1])


def specs(tree) -> dict[str, jax.sharding.PartitionSpec]:
  found = jax.tree_util.tree_leaves_with_path(tree)
  return {optimizer.name(path): leaf.spec for path, leaf in found}


def test_every_parameter_lies_as_its_axes_say():
  leaves = p.abstract(MOE, 512)
  found = specs(sharding.shardings(leaves, ON))
  assert found['moe/mlp/wg_NEDF'] == P(None, 'expert', 'fsdp', 'tensor')
  assert found['moe/attn/wk_NLQP'] == P(None, ('fsdp', 'expert'), 'tensor', None)
  assert found['dense/mlp/wd_NFD'] == P(None, 'tensor', ('fsdp', 'expert'))
  assert found['moe/mlp/router_NDE'] == P(None, ('fsdp', 'expert'), None)
  assert found['head_VD'] == P('tensor', ('fsdp', 'expert'))
  # Nothing of size is whole on every device.
  for path, leaf in jax.tree_util.tree_leaves_with_path(leaves):
    if np.prod(leaf.shape) > 10_000:
      assert any(found[optimizer.name(path)]), path


def test_an_optimisers_state_lies_as_the_parameters_and_counts_on_all():
  leaves = p.abstract(MOE, 512)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), leaves)
  tx = optimizer.make(config.Optim(), optimizer.schedule(config.Optim()))
  opt = jax.eval_shape(tx.init, shapes)
  want = specs(sharding.shardings(leaves, ON))
  found = sharding.like(opt, leaves, ON)
  assert jax.tree.structure(found) == jax.tree.structure(opt)
  moments = 0
  for (path, spec), leaf in zip(
    jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(opt), strict=True
  ):
    name = optimizer.name(path)
    ends = [key for key in want if name.endswith('/' + key)]
    moments += bool(ends)
    # 'moe/..' and 'dense/..' end alike: the longest is meant.
    expected = want[max(ends, key=len)] if ends else P()
    assert spec.spec == expected, (name, leaf.shape)
  muon = sum(v == 'muon' for v in jax.tree.leaves(optimizer.labels(shapes)))
  assert moments == muon + 2 * (len(want) - muon)


def test_without_a_mesh_nothing_is_said():
  x = jnp.ones((4, 4))
  assert sharding.current() == {}
  assert sharding.constrain(x, 'batch', 'time') is x
  assert 'sharding_constraint' not in str(
    jax.make_jaxpr(lambda x: sharding.constrain(x, 'batch', ''))(x)
  )


def test_with_one_a_constraint_is_and_inside_a_shard_map_none_of_its_axes_count():
  on = sharding.mesh({}, jax.devices()[:1])
  seen = []

  def inside(x: jax.Array) -> jax.Array:
    seen.append(sharding.current())
    return sharding.constrain(x, 'batch', '')

  with jax.set_mesh(on):
    assert sharding.current() == dict(on.shape)
    text = str(jax.make_jaxpr(lambda x: sharding.constrain(x, 'batch', ''))(X))
    spread = jax.shard_map(inside, in_specs=P('fsdp'), out_specs=P('fsdp'))
    jax.make_jaxpr(spread)(X)
  assert 'sharding_constraint' in text
  assert seen == [{}]
