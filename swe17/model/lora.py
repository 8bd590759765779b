"""Low-rank adapters: what trains in the place of the matrices that they stand beside.

  y = x W + (alpha / r) (x A) B         A [in, r] drawn, B [r, out] zero at the start

(LoRA, arXiv:2106.09685.) Adapters are leaves of the one parameter tree, so they are
split, saved, published and served as every other leaf. A tree with adapters has a
*base*, all the rest, which nothing moves: a gradient and an optimiser's state are of
the adapters alone.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import struct
import jax

# A parameter tree with anything at its leaves, see `params.Tree`.
Tree = Any

# Leaf of a layer -> (its adapter, whether it takes the last of what that gives). The
# two matrices that files hold as one share an adapter: what goes in is the same.
OF = {
  'attn/wq_NDQH': ('q', False),
  'attn/wk_NDCH': ('k', False),
  'attn/wv_NDCH': ('v', False),
  'attn/wo_NQHD': ('o', False),
  'attn/wkv_down_NDL': ('kv_a', False),
  'attn/wk_rope_NDr': ('kv_a', True),
  'attn/wk_NLQP': ('kv_b', False),
  'attn/wv_NLQU': ('kv_b', True),
  'attn/wo_NQUD': ('o', False),
  'attn/wq_down_NDA': ('q_a', False),
  'attn/wq_NAQH': ('q_b', False),  # 'q' where there is no latent query
  'mlp/wg_NDF': ('gate', False),
  'mlp/wu_NDF': ('up', False),
  'mlp/wd_NFD': ('down', False),
  'mlp/wg_NEDF': ('expert_gate', False),
  'mlp/wu_NEDF': ('expert_up', False),
  'mlp/wd_NEFD': ('expert_down', False),
}


@struct.dataclass
class Adapter:
  """A low-rank addition to one matrix of each layer; of each expert, E after N.

  The axes of a matrix's heads are flat, in and out (I, O). `scale` is alpha / r.
  """

  a_NIr: jax.Array
  b_NrO: jax.Array
  scale: float = struct.field(pytree_node=False)


Adapters = Mapping[str, Adapter]


def _is_adapter(x: Any) -> bool:
  return isinstance(x, Adapter)


def base(tree: Tree) -> Tree:
  """`tree` with None for every adapter."""
  return jax.tree.map(
    lambda x: None if _is_adapter(x) else x, tree, is_leaf=_is_adapter
  )


def adapters(tree: Tree) -> Tree:
  """`tree` with None for everything else."""
  return jax.tree.map(
    lambda x: x if _is_adapter(x) else None, tree, is_leaf=_is_adapter
  )


def joined(like: Tree, of_base: Tree, of_adapters: Tree) -> Tree:
  """A tree as `like`, from what `base` and `adapters` gave."""
  return jax.tree.map(
    lambda x, b, a: a if _is_adapter(x) else b,
    like,
    of_base,
    of_adapters,
    is_leaf=_is_adapter,
  )


def present(tree: Tree) -> bool:
  """Whether there are adapters in it."""
  return any(map(_is_adapter, jax.tree.leaves(tree, is_leaf=_is_adapter)))


def trained(params: Tree) -> Tree:
  """What a step moves: the adapters if there are any, else everything."""
  return adapters(params) if present(params) else params


def moved(params: Tree, to: Tree) -> Tree:
  """`params` with `to` in the place of `trained(params)`."""
  return joined(params, params, to) if present(params) else to


def down(x_BTI: jax.Array, adapter: Adapter) -> jax.Array:
  """(alpha / r) x A over the last axis, [..., r], as one plain matrix product."""
  a_Ir = adapter.a_NIr
  low = adapter.scale * (x_BTI.reshape(-1, a_Ir.shape[0]) @ a_Ir)
  return low.reshape(*x_BTI.shape[:-1], a_Ir.shape[1])


def columns(adapter: Adapter, of: slice, Q: int = 1) -> Adapter:
  """Some of the columns that each of Q heads has; one layer's leaves."""
  r = adapter.b_NrO.shape[0]
  b_rQO = adapter.b_NrO.reshape(r, Q, -1)[:, :, of]
  return dataclasses.replace(adapter, b_NrO=b_rQO.reshape(r, -1))


def by_path(tree: Tree) -> dict[str, Adapter]:
  """Adapters by their path, joined by '/'."""
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_adapter)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in found
    if _is_adapter(x)
  }


def beside(by_path: Adapters, leaf: str) -> tuple[Adapter, bool] | None:
  """(adapter, last) of the matrix at path `leaf`, see `OF`; None: it has none."""
  layer, _, name = leaf.rpartition('/')
  _, _, kind = layer.partition('/')  # of 'dense/attn', 'moe/mlp/shared'
  found, last = OF.get(f'{kind.split("/")[0]}/{name}', ('', False))
  for target in (found, 'q') if found == 'q_b' else (found,):
    if f'{layer}/lora/{target}' in by_path:
      return by_path[f'{layer}/lora/{target}'], last
  return None


def part_of(w: Any, shape: tuple[int, ...], last: bool) -> Any:
  """Of columns [..., O], head by head, the first or last ones, in `shape`."""
  each = w.reshape(*shape[:-1], -1)
  return each[..., -shape[-1] :] if last else each[..., : shape[-1]]
