"""Which program computes attention over packed rows (`model.attention_kernel`).

  chunked   XLA's own products, block by block (model/attention.py); in a ring where a
            mesh splits the rows (model/ring_attention.py). Every backend.
  cudnn     cuDNN's fused kernel, on an NVIDIA GPU, in bfloat16. It knows no segments:
            they come as a mask, `attention_chunk` queries at a time (a mask of the
            whole row would be quadratic in it).
  splash    the Pallas kernel for TPU, which knows segments, but no shared prefixes.

Memory is linear in the row with each. What a kernel cannot do is refused, not done by
another.
"""

from collections.abc import Callable
import functools
from typing import Literal

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from swe17 import config
from swe17.model import attention, ring_attention, sharding

Kernel = Callable[..., jax.Array]
_LANES = 128  # of a TPU: blocks of positions are multiples of it
_BLOCK = 512  # positions of the largest block of splash
_BACKEND = {'cudnn': 'gpu', 'splash': 'tpu'}


def attend(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  cfg: config.Model,
  prefix_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments of packed rows, [B, T, Q, U], as configured.

  A query also sees the segment `prefix_BT` of its row (0: none), as `attention.packed`.

  Raises:
    ValueError: the kernel cannot do it here.
  """
  args, kernel = (q_BTQH, k_BTCH, v_BTCU, segment_BT), cfg.attention_kernel
  all_args = args if prefix_BT is None else (*args, prefix_BT)
  split = sharding.current().get(ring_attention.AXIS, 1) > 1
  if kernel == 'chunked' and split:
    return ring_attention.packed(*args, cfg.attention_chunk, prefix_BT)
  if kernel == 'chunked':
    return _each_shard(functools.partial(_chunked, chunk=cfg.attention_chunk), all_args)
  backend = jax.default_backend()
  if backend != _BACKEND[kernel]:
    raise ValueError(
      f'model.attention_kernel={kernel!r} on {backend}: want {_BACKEND[kernel]}, or '
      "'chunked'"
    )
  if split:
    raise ValueError(
      f"model.attention_kernel={kernel!r} with mesh.context above 1: want 'chunked'"
    )
  if kernel == 'splash':
    if prefix_BT is not None:
      raise ValueError(
        "model.attention_kernel='splash': got shared prefixes, want none "
        '(batch.share_prompts=False)'
      )
    return _each_shard(splash, args)
  return _each_shard(functools.partial(cudnn, chunk=cfg.attention_chunk), all_args)


def _chunked(*args: jax.Array, chunk: int) -> jax.Array:
  return attention.packed(*args[:4], chunk, *args[4:])


def _each_shard(fn: Kernel, args: tuple[jax.Array, ...]) -> jax.Array:
  """`fn` on a mesh: a kernel of its own for each shard of rows and heads.

  What the mesh does not divide, each shard computes whole.
  """
  sizes = sharding.current()
  if not sizes:
    return fn(*args)
  (B, _, Q, _), C = args[0].shape, args[1].shape[2]
  rows = sharding.spec(('batch',), (B,), sizes)[0]
  tensor = sizes.get('tensor', 1)
  heads = jax.P(rows, None, None if Q % tensor or C % tensor else 'tensor')
  return jax.shard_map(
    fn,
    in_specs=(heads, heads, heads, *(jax.P(rows) for _ in args[3:])),
    out_specs=heads,
    check_vma=False,
  )(*args)


def cudnn(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  prefix_BT: jax.Array | None = None,
  *,
  chunk: int,
  implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> jax.Array:
  """By `jax.nn.dot_product_attention`, `chunk` queries at a time.

  A chunk's mask is made again in the backward pass (as is its output). cuDNN wants
  bfloat16 and one width of heads: narrower values are filled up with zeros.
  """
  if implementation == 'cudnn' and q_BTQH.dtype != jnp.bfloat16:
    raise ValueError(
      f"model.attention_kernel='cudnn': got {q_BTQH.dtype}, want model.dtype=bfloat16"
    )
  (T, _, H), U = q_BTQH.shape[1:], v_BTCU.shape[-1]
  if U > H:
    raise ValueError(
      f"model.attention_kernel='cudnn': got values of {U} dimensions, want at most "
      f'those of a key, {H}'
    )
  v_BTCH = jnp.pad(v_BTCU, ((0, 0), (0, 0), (0, 0), (0, H - U)))

  def part(start: int, end: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    prefix_Bt = None if prefix_BT is None else prefix_BT[:, start:end]
    see_BtS = attention.visible(
      segment_BT[:, start:end], segment_BT[:, :end], prefix_Bt
    )
    causal_tS = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
    return jax.nn.dot_product_attention(
      q[:, start:end],
      k[:, :end],
      v[:, :end],
      mask=(see_BtS & causal_tS[None])[:, None],
      implementation=implementation,
    )

  # The whole arrays go in: what is kept for the backward pass is they, not their parts.
  part = jax.checkpoint(part, static_argnums=(0, 1))
  outs = []
  for start in range(0, T, chunk):
    outs.append(part(start, min(start + chunk, T), q_BTQH, k_BTCH, v_BTCH))
  return jnp.concatenate(outs, axis=1)[..., :U]


def splash(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """By the Pallas kernel; `interpret` runs it anywhere, slowly, to be checked."""
  T, Q, H = q_BTQH.shape[1:]
  if T % _LANES:
    raise ValueError(
      f"model.attention_kernel='splash': got rows of {T} tokens, want a multiple of "
      f'{_LANES} (batch.row_length)'
    )
  block = max(b for b in range(_LANES, min(_BLOCK, T) + 1, _LANES) if T % b == 0)
  causal = splash_attention.CausalMask((T, T))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([causal] * Q),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )

  def row(
    q_TQH: jax.Array, k_TCH: jax.Array, v_TCU: jax.Array, segment_T: jax.Array
  ) -> jax.Array:
    heads = (jnp.swapaxes(x, 0, 1) for x in (q_TQH, k_TCH, v_TCU))
    ids = splash_attention.SegmentIds(q=segment_T, kv=segment_T)
    out_QTU = kernel(*heads, segment_ids=ids)
    assert isinstance(out_QTU, jax.Array)
    return jnp.swapaxes(out_QTU, 0, 1)

  scale = (1 / jnp.sqrt(jnp.float32(H))).astype(q_BTQH.dtype)
  return jax.vmap(row)(q_BTQH * scale, k_BTCH, v_BTCU, segment_BT)
