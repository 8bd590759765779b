"""Where every leaf's values lie in the tensors of a file. Without JAX.

A `Part` maps one tensor of a file, or a range of it, to one leaf, or to one layer or
expert of it; a model's table is a list of them. Reading and writing use the same table,
so that what is written is what is read.

Files hold matrices as [out, in]; heads of one projection lie side by side. Rotating
dimensions stand in halves here, (i, i + r / 2). DeepSeek's files, and GGUF's of Llama
models, hold them in pairs, (2i, 2i + 1): `Part.pairs` of a leaf's last dimensions.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import itertools
import math

import numpy as np

from swe17 import config_model

HF = {
  'embed_VD': 'model.embed_tokens.weight',
  'norm_D': 'model.norm.weight',
  'head_VD': 'lm_head.weight',
  'attn_norm_ND': 'model.layers.{i}.input_layernorm.weight',
  'mlp_norm_ND': 'model.layers.{i}.post_attention_layernorm.weight',
  'q': 'model.layers.{i}.self_attn.q_proj.weight',
  'k': 'model.layers.{i}.self_attn.k_proj.weight',
  'v': 'model.layers.{i}.self_attn.v_proj.weight',
  'o': 'model.layers.{i}.self_attn.o_proj.weight',
  'q bias': 'model.layers.{i}.self_attn.q_proj.bias',
  'k bias': 'model.layers.{i}.self_attn.k_proj.bias',
  'v bias': 'model.layers.{i}.self_attn.v_proj.bias',
  'q norm': 'model.layers.{i}.self_attn.q_norm.weight',
  'k norm': 'model.layers.{i}.self_attn.k_norm.weight',
  'q down': 'model.layers.{i}.self_attn.q_a_proj.weight',
  'q down norm': 'model.layers.{i}.self_attn.q_a_layernorm.weight',
  'q up': 'model.layers.{i}.self_attn.q_b_proj.weight',
  'kv down': 'model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight',
  'kv down norm': 'model.layers.{i}.self_attn.kv_a_layernorm.weight',
  'kv up': 'model.layers.{i}.self_attn.kv_b_proj.weight',
  'gate': 'model.layers.{i}.mlp.gate_proj.weight',
  'up': 'model.layers.{i}.mlp.up_proj.weight',
  'down': 'model.layers.{i}.mlp.down_proj.weight',
  'router': 'model.layers.{i}.mlp.gate.weight',
  'router bias': 'model.layers.{i}.mlp.gate.e_score_correction_bias',
  'expert gate': 'model.layers.{i}.mlp.experts.{e}.gate_proj.weight',
  'expert up': 'model.layers.{i}.mlp.experts.{e}.up_proj.weight',
  'expert down': 'model.layers.{i}.mlp.experts.{e}.down_proj.weight',
  'experts gate up': 'model.layers.{i}.mlp.experts.gate_up_proj',
  'experts down': 'model.layers.{i}.mlp.experts.down_proj',
  'shared gate': 'model.layers.{i}.mlp.shared_experts.gate_proj.weight',
  'shared up': 'model.layers.{i}.mlp.shared_experts.up_proj.weight',
  'shared down': 'model.layers.{i}.mlp.shared_experts.down_proj.weight',
}
GGUF = {
  'embed_VD': 'token_embd.weight',
  'norm_D': 'output_norm.weight',
  'head_VD': 'output.weight',
  'attn_norm_ND': 'blk.{i}.attn_norm.weight',
  'mlp_norm_ND': 'blk.{i}.ffn_norm.weight',
  'q': 'blk.{i}.attn_q.weight',
  'k': 'blk.{i}.attn_k.weight',
  'v': 'blk.{i}.attn_v.weight',
  'o': 'blk.{i}.attn_output.weight',
  'q bias': 'blk.{i}.attn_q.bias',
  'k bias': 'blk.{i}.attn_k.bias',
  'v bias': 'blk.{i}.attn_v.bias',
  'q norm': 'blk.{i}.attn_q_norm.weight',
  'k norm': 'blk.{i}.attn_k_norm.weight',
  'gate': 'blk.{i}.ffn_gate.weight',
  'up': 'blk.{i}.ffn_up.weight',
  'down': 'blk.{i}.ffn_down.weight',
}


@dataclasses.dataclass(frozen=True)
class Part:
  """A leaf's values, or those of one layer or expert, in a file's tensor.

  Attributes:
    leaf: path of the leaf, joined by '/'.
    at: its leading indices: (), (layer,) or (layer, expert).
    tensor: name in the file.
    dims: for every dimension of the tensor the axes it is made of, slowest first;
      all of them in a row are the *view*.
    order: axes of the view in the order of the leaf (after `at`).
    range: (axis of the view, start, stop) where the leaf has a part of the tensor.
    pairs: how many of the leaf's last dimensions stand in pairs in the file.
  """

  leaf: str
  at: tuple[int, ...]
  tensor: str
  dims: tuple[tuple[int, ...], ...]
  order: tuple[int, ...]
  range: tuple[int, int, int] | None = None
  pairs: int = 0

  @property
  def view(self) -> tuple[int, ...]:
    return tuple(itertools.chain(*self.dims))

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    return tuple(math.prod(axes) for axes in self.dims)

  @property
  def leaf_shape(self) -> tuple[int, ...]:
    """Of what it fills, the indices `at` left out."""
    taken = [stop - start for start, stop in self._bounds()]
    return tuple(taken[axis] for axis in self.order)

  def _bounds(self) -> list[tuple[int, int]]:
    bounds = [(0, size) for size in self.view]
    if self.range is not None:
      bounds[self.range[0]] = self.range[1:]
    return bounds

  def slices(self, index: Sequence[slice]) -> tuple[slice, ...]:
    """The smallest box of the tensor that holds the leaf's values at `index`."""
    bounds, axis, found = self._view_bounds(index), 0, []
    for axes in self.dims:
      inner = math.prod(axes[1:])
      start, stop = bounds[axis]
      found.append(slice(start * inner, stop * inner))
      axis += len(axes)
    return tuple(found)

  def _view_bounds(self, index: Sequence[slice]) -> list[tuple[int, int]]:
    """Bounds of `index` in the view. Pairs are read whole."""
    bounds = self._bounds()
    for i, (axis, size) in enumerate(zip(self.order, self.leaf_shape, strict=True)):
      start, stop, step = index[i].indices(size)
      assert step == 1
      if not (self.pairs and i == len(self.order) - 1):
        first = bounds[axis][0]
        bounds[axis] = first + start, first + stop
    return bounds

  def to_leaf(self, box: np.ndarray, index: Sequence[slice]) -> np.ndarray:
    """The leaf's values at `index` from the tensor's at `slices(index)`."""
    bounds, axis, shape, inside = self._view_bounds(index), 0, [], []
    for axes in self.dims:
      start, stop = bounds[axis]
      shape += [stop - start, *axes[1:]]
      inside += [slice(None), *(slice(*b) for b in bounds[axis + 1 : axis + len(axes)])]
      axis += len(axes)
    values = box.reshape(shape)[tuple(inside)].transpose(self.order)
    if not self.pairs:
      return values
    return values[..., _halves(self.leaf_shape[-1], self.pairs)][..., index[-1]]

  def into(self, tensor: np.ndarray, values: np.ndarray) -> None:
    """Writes the leaf's values to their places in `tensor`."""
    if self.pairs:
      back = np.argsort(_halves(self.leaf_shape[-1], self.pairs))
      values = values[..., back]
    place = tuple(slice(*bound) for bound in self._bounds())
    tensor.reshape(self.view)[place] = values.transpose(np.argsort(self.order))


def _halves(size: int, pairs: int) -> np.ndarray:
  """Where in the file each of `size` dimensions stands, the last `pairs` in pairs."""
  still, turning = np.arange(size - pairs), np.arange(size - pairs, size)
  return np.concatenate([still, turning[0::2], turning[1::2]])


def table(
  cfg: config_model.Model,
  vocab: int,
  names: dict[str, str],
  present: Collection[str] = (),
  *,
  interleaved: bool = False,
) -> list[Part]:
  """Every leaf of the model `cfg` in the tensors that `names` names.

  Args:
    cfg: the shape. ValueError if `names` has none for one of its leaves.
    vocab: rows of the embedding.
    names: `HF` or `GGUF`.
    present: names in the file, which tell in which of two layouts experts lie; without,
      each expert has tensors of its own, as in published models.
    interleaved: rotating dimensions stand in pairs in the file.
  """
  V, D = (vocab,), (cfg.width,)
  found = [
    Part('embed_VD', (), names['embed_VD'], (V, D), (0, 1)),
    Part('norm_D', (), names['norm_D'], (D,), (0,)),
  ]
  if not cfg.tied:
    found.append(Part('head_VD', (), names['head_VD'], (V, D), (0, 1)))
  for i in range(cfg.layers):
    dense = i < cfg.dense_layers
    stack, at = ('dense', i) if dense else ('moe', i - cfg.dense_layers)
    layer = _Layer(cfg, names, f'{stack}/', i, at, interleaved)
    found.append(layer.vector('attn_norm_ND', cfg.width))
    found.append(layer.vector('mlp_norm_ND', cfg.width))
    found += _latent(layer) if cfg.attention == 'mla' else _grouped(layer)
    if dense:
      found += _dense(layer, 'mlp', '', cfg.ffn)
    else:
      found += _experts(layer, present)
  return found


@dataclasses.dataclass(frozen=True)
class _Layer:
  """One layer of the table in the making."""

  cfg: config_model.Model
  names: dict[str, str]
  stack: str
  i: int
  at: int
  interleaved: bool

  def part(
    self, leaf: str, key: str, dims: tuple, order: tuple, e: int | None = None, **more
  ) -> Part:
    if key not in self.names:
      raise ValueError(f'{self.stack}{leaf}: files of this kind have no name for it')
    at = (self.at,) if e is None else (self.at, e)
    name = self.names[key].format(i=self.i, e=e)
    return Part(self.stack + leaf, at, name, dims, order, **more)

  def vector(self, leaf: str, size: int, key: str = '') -> Part:
    return self.part(leaf, key or leaf, ((size,),), (0,))

  def matrix(
    self, leaf: str, key: str, In: int, Out: int, e: int | None = None
  ) -> Part:
    return self.part(leaf, key, ((Out,), (In,)), (1, 0), e)


def _grouped(layer: _Layer) -> Iterator[Part]:
  cfg = layer.cfg
  D, H = (cfg.width,), cfg.head_dim
  pairs = H if layer.interleaved else 0
  for x, axis, heads in (
    ('q', 'Q', cfg.heads),
    ('k', 'C', cfg.kv_heads),
    ('v', 'C', cfg.kv_heads),
  ):
    turns = 0 if x == 'v' else pairs
    rows = (heads, H)
    yield layer.part(f'attn/w{x}_ND{axis}H', x, (rows, D), (2, 0, 1), pairs=turns)
    if cfg.bias:
      yield layer.part(f'attn/b{x}_N{axis}H', f'{x} bias', (rows,), (0, 1), pairs=turns)
    if cfg.qk_norm and x != 'v':
      yield layer.part(f'attn/{x}_norm_NH', f'{x} norm', ((H,),), (0,), pairs=turns)
  yield layer.part('attn/wo_NQHD', 'o', (D, (cfg.heads, H)), (1, 2, 0))


def _latent(layer: _Layer) -> Iterator[Part]:
  cfg = layer.cfg
  D, Q, H, r = cfg.width, cfg.heads, cfg.head_dim, cfg.rotary_dim
  A, L, U = cfg.mla.q_rank, cfg.mla.kv_rank, cfg.mla.v_dim
  P, pairs = H - r, r if layer.interleaved else 0
  if A:
    yield layer.matrix('attn/wq_down_NDA', 'q down', D, A)
    yield layer.vector('attn/q_norm_NA', A, 'q down norm')
  rows = ((Q, H), (A or D,))
  yield layer.part('attn/wq_NAQH', 'q up' if A else 'q', rows, (2, 0, 1), pairs=pairs)
  down, kv_down = ((L + r,), (D,)), 'kv down'
  yield layer.part('attn/wkv_down_NDL', kv_down, down, (1, 0), range=(0, 0, L))
  yield layer.part(
    'attn/wk_rope_NDr', kv_down, down, (1, 0), range=(0, L, L + r), pairs=pairs
  )
  yield layer.vector('attn/kv_norm_NL', L, 'kv down norm')
  up = ((Q, P + U), (L,))
  yield layer.part('attn/wk_NLQP', 'kv up', up, (2, 0, 1), range=(1, 0, P))
  yield layer.part('attn/wv_NLQU', 'kv up', up, (2, 0, 1), range=(1, P, P + U))
  yield layer.part('attn/wo_NQUD', 'o', ((D,), (Q, U)), (1, 2, 0))


def _dense(layer: _Layer, leaf: str, key: str, F: int) -> Iterator[Part]:
  D = layer.cfg.width
  yield layer.matrix(f'{leaf}/wg_NDF', f'{key}gate', D, F)
  yield layer.matrix(f'{leaf}/wu_NDF', f'{key}up', D, F)
  yield layer.matrix(f'{leaf}/wd_NFD', f'{key}down', F, D)


def _experts(layer: _Layer, present: Collection[str]) -> Iterator[Part]:
  D, E, F = layer.cfg.width, layer.cfg.moe.experts, layer.cfg.moe.ffn
  yield layer.matrix('mlp/router_NDE', 'router', D, E)
  if layer.cfg.moe.router == 'sigmoid':
    yield layer.vector('mlp/bias_NE', E, 'router bias')
  if layer.cfg.moe.shared:
    yield from _dense(layer, 'mlp/shared', 'shared ', layer.cfg.moe.shared * F)
  if layer.names.get('experts gate up', '').format(i=layer.i) in present:
    for leaf, start in (('mlp/wg_NEDF', 0), ('mlp/wu_NEDF', F)):
      dims, taken = ((E,), (2 * F,), (D,)), (1, start, start + F)
      yield layer.part(leaf, 'experts gate up', dims, (0, 2, 1), range=taken)
    yield layer.part('mlp/wd_NEFD', 'experts down', ((E,), (D,), (F,)), (0, 2, 1))
    return
  for e in range(E):
    yield layer.matrix('mlp/wg_NEDF', 'expert gate', D, F, e)
    yield layer.matrix('mlp/wu_NEDF', 'expert up', D, F, e)
    yield layer.matrix('mlp/wd_NEFD', 'expert down', F, D, e)
