"""A model's files into parameters: strict, in pieces, each device its own.

Every leaf is filled exactly once and no tensor is left over, else nothing is loaded.
Beyond the model, memory holds one leaf's piece for one device and one tensor of the
file (a layer's, or an expert's). Masters are float32; what files hold in fewer bits is
widened, which is exact.
"""

from collections.abc import Mapping, Sequence
import gc
import itertools
import re
from typing import Any

import jax
import numpy as np

from swe17 import config
from swe17.model import hf_files, lora, names
from swe17.model import params as p
from swe17.model import source as sources

_FILL = dict[tuple[int, ...], names.Part]  # leading indices of a leaf -> what is there

# Buffers that some files hold and everybody computes.
_IGNORED = re.compile(r'.*\.rotary_emb\.inv_freq$|rope_freqs\.weight$')


def load(
  source: str,
  cfg: config.Model,
  shardings: p.Tree | None = None,
  key: jax.Array | None = None,
) -> p.Params:
  """The parameters of the model at `source`, float32.

  Args:
    source: a folder, a .gguf file or `pip:package`; see `model/source.py`.
    cfg: its settings, as `source.settle` made them.
    shardings: for every leaf a `jax.sharding.Sharding`; each process then reads only
      what its devices hold. None: all of it, on the default device.
    key: draws the adapters that `cfg.lora` asks for, which files of a model have not.

  Raises:
    ValueError: the shape is not `cfg`'s, or a tensor (named) is missing, left over,
      twice there, or of another shape or dtype.
  """
  opened = sources.open(source)
  if sources.merged(cfg, opened.described.model) != cfg:
    raise ValueError(f'{source}: its shape is not that of the settings')
  fills = fills_of(opened, cfg)
  abstract = p.abstract(cfg, opened.described.vocab)
  leaves, tree = jax.tree.flatten(lora.base(abstract))
  placed: list[Any] = [None] * len(fills)
  if shardings is not None:
    placed = jax.tree.leaves(lora.base(shardings))
  made = []
  for leaf, fill, sharding in zip(leaves, fills.values(), placed, strict=True):
    made.append(_leaf(leaf, fill, opened.tensors, sharding))
  base = jax.tree.unflatten(tree, made)
  if not cfg.lora.rank:
    return base
  if key is None:
    raise ValueError(f'model.lora.rank={cfg.lora.rank}: got no key, want one')
  where = None if shardings is None else lora.adapters(shardings)
  drawn = jax.jit(lambda key: p.init_adapters(abstract, key), out_shardings=where)
  return lora.joined(abstract, base, drawn(key))


def by_name(params: p.Tree) -> dict[str, Any]:
  """Leaves by their path, joined by '/', in the order of the tree."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def fills_of(opened: sources.Opened, cfg: config.Model) -> dict[str, _FILL]:
  """For every leaf, in the order of the tree, the parts that fill it; all checked.

  Adapters are left out: they are in no file of a model.
  """
  described, tensors = opened.described, opened.tensors
  table = names.table(
    cfg,
    described.vocab,
    opened.names,
    tensors.shapes,
    interleaved=described.interleaved,
  )
  skipped = range(cfg.layers, cfg.layers + described.skipped)
  _check_tensors(table, tensors, skipped, opened.names['head_VD'] if cfg.tied else '')
  if cfg.tied:
    _check_tied(opened)
  fills: dict[str, _FILL] = {}
  for part in table:
    fill = fills.setdefault(part.leaf, {})
    assert part.at not in fill, part
    fill[part.at] = part
  in_order = {}
  for name, leaf in by_name(lora.base(p.abstract(cfg, described.vocab))).items():
    in_order[name] = fills.pop(name, {})
    _check_leaf(name, leaf.shape, in_order[name])
  assert not fills, fills.keys()
  return in_order


def _check_tensors(
  table: Sequence[names.Part],
  tensors: hf_files.Tensors,
  skipped: range,
  tied_head: str,
) -> None:
  """ValueError unless the file has exactly the tensors of the table."""
  want = {part.tensor: part for part in table}
  missing = [name for name in want if name not in tensors.shapes]
  further = tuple(f'model.layers.{i}.' for i in skipped)
  left_over = [
    name
    for name in tensors.shapes
    if name not in want
    and not _IGNORED.match(name)
    and not name.startswith(further)
    and name != tied_head
  ]
  problems = [
    f'{what}: {hf_files.named(which)}'
    for what, which in (('missing', missing), ('left over', left_over))
    if which
  ]
  if problems:
    raise ValueError(f'tensors do not match the model: {"; ".join(problems)}')
  for name, part in want.items():
    got, dtype = tensors.shapes[name], tensors.dtypes[name]
    if got != part.tensor_shape:
      raise ValueError(
        f'{name} ({part.leaf}): got shape {got}, want {part.tensor_shape}'
      )
    if dtype not in tensors.readable:
      raise ValueError(
        f'{name} ({part.leaf}): got {dtype}, want {", ".join(sorted(tensors.readable))}'
        ': dequantise the file first'
      )


def _check_tied(opened: sources.Opened) -> None:
  """A file of a tied model may hold its head too; then it must be the embedding."""
  head, embed = opened.names['head_VD'], opened.names['embed_VD']
  tensors, shapes = opened.tensors, opened.tensors.shapes
  if head not in shapes:
    return
  rows, width = shapes[embed]
  step = max(1, 2**22 // width)
  same = shapes[head] == shapes[embed]
  for start in range(0, rows, step):
    box = slice(start, min(start + step, rows)), slice(0, width)
    same = same and np.array_equal(tensors.read(head, box), tensors.read(embed, box))
  if not same:
    raise ValueError(f'{head} differs from {embed}, but the model is tied')


def _check_leaf(name: str, shape: tuple[int, ...], fill: _FILL) -> None:
  """ValueError unless the parts fill the leaf, each place once."""
  lead = {len(at) for at in fill}
  if len(lead) != 1:
    raise ValueError(f'{name}: got experts in two layouts in one file, want one')
  (size,) = lead
  want = set(itertools.product(*(range(n) for n in shape[:size])))
  assert fill.keys() == want, name
  assert all(part.leaf_shape == shape[size:] for part in fill.values()), name


def _leaf(
  leaf: p.Leaf,
  fill: _FILL,
  tensors: hf_files.Tensors,
  sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Device by device, each waited for: the host holds one piece at a time.

  (`jax.make_array_from_callback` collects the pieces of all devices first.)
  """
  if sharding is None:
    return _put(_values(leaf.shape, fill, tensors, _whole(leaf.shape)), None)
  pieces = []
  for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
    index = _whole(leaf.shape) if index is None else index
    pieces.append(_put(_values(leaf.shape, fill, tensors, index), device))
  return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)


def _whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
  return tuple(slice(0, n) for n in shape)


def _put(values: np.ndarray, device: jax.Device | None) -> jax.Array:
  """On the device, and the host's copy let go.

  JAX gives up its reference to host memory only when it is called again, or at a
  garbage collection: without one, the host holds the last piece beside the next.
  """
  made = jax.block_until_ready(jax.device_put(values, device))
  del values
  gc.collect(0)
  return made


def _values(
  shape: tuple[int, ...],
  fill: Mapping[tuple[int, ...], names.Part],
  tensors: hf_files.Tensors,
  index: Sequence[slice],
) -> np.ndarray:
  """A leaf's values at `index`, from the tensors that hold them."""
  index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
  lead = len(next(iter(fill)))
  found = np.empty([s.stop - s.start for s in index], np.float32)
  places = [range(s.start, s.stop) for s in index[:lead]]
  for at in itertools.product(*places):
    part, rest = fill[at], index[lead:]
    into = tuple(i - s.start for i, s in zip(at, index, strict=False))
    found[into] = part.to_leaf(tensors.read(part.tensor, part.slices(rest)), rest)
  return found
