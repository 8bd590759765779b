"""The gradient of gathered rows: sorted by id, summed by segment, written in order.

  out[v] = sum_{p: id_p = v} coef_p h[row_p]

A scatter-add with repeated ids is unordered on GPU and slow on CPU (FACTS.md 6). Here
pairs are sorted by id, ties by position, and summed block by block in that order: in a
block by a product with the matrix [id_p = id_q] coef_q, whose first row of each segment
is added to what the id had and written once. Blocks follow one another, no block names
an id twice: same pairs, same bits.

Id and position share one 32-bit key, because XLA on CPU sorts a single operand about
10 times as fast as a pair (65,536 entries: 4 ms against 43). Where the two don't fit,
the pairs are cut into groups whose positions do.
"""

import jax
import jax.numpy as jnp


def row_sums(
  id_P: jax.Array,
  coef_P: jax.Array,
  row_P: jax.Array,
  h_XD: jax.Array,
  V: int,
  *,
  block: int,
) -> jax.Array:
  """Sums coef_p h[row_p] over the pairs of each id, float32 [V, D].

  Args:
    id_P: int32; a pair whose id is outside of [0, V) is left out, whatever it holds.
    coef_P: float32.
    row_P: int32 rows of h.
    h_XD: float32; rows that no pair inside names may hold anything.
    V: ids.
    block: pairs summed at once. The time in products grows with it, the overhead of
      the loop shrinks; the trip count follows the number of pairs inside.
  """
  P, D = id_P.shape[0], h_XD.shape[1]
  bits = 32 - V.bit_length()  # left for a position in its group
  if bits < 8:
    raise ValueError(f'V: got {V}, want below {1 << 24}')
  bits = min(bits, max(P - 1, 1).bit_length())
  G = 1 << bits
  pad = -P % G
  inside_P = (id_P >= 0) & (id_P < V)
  id_P = jnp.pad(jnp.where(inside_P, id_P, V), (0, pad), constant_values=V)
  key_P = id_P.astype(jnp.uint32) << bits
  lane_C = jnp.arange(block)

  def group(g: jax.Array, out_VD: jax.Array) -> jax.Array:
    key_G = jax.lax.dynamic_slice(key_P, (g * G,), (G,))
    key_G = jax.lax.sort(key_G | jnp.arange(G, dtype=jnp.uint32), is_stable=False)
    count = jnp.sum((key_G >> bits) < V)
    key_G = jnp.pad(key_G, (0, block), constant_values=jnp.uint32(V << bits))

    def body(i: jax.Array, out_VD: jax.Array) -> jax.Array:
      key_C = jax.lax.dynamic_slice(key_G, (i * block,), (block,))
      id_C = (key_C >> bits).astype(jnp.int32)
      at_C = g * G + (key_C & jnp.uint32(G - 1)).astype(jnp.int32)
      inside_C = id_C < V
      # What lies outside may be NaN, which a coefficient of 0 would not remove.
      coef_C = jnp.where(inside_C, coef_P[at_C], 0.0)
      h_CD = jnp.where(inside_C[:, None], h_XD[row_P[at_C]], 0.0)
      same_CC = id_C[:, None] == id_C[None, :]
      sum_CD = jnp.where(same_CC, coef_C[None, :], 0.0) @ h_CD
      sum_CD += out_VD[jnp.minimum(id_C, V - 1)]
      first_C = (lane_C == 0) | (id_C != jnp.roll(id_C, 1))
      to_C = jnp.where(first_C & inside_C, id_C, V + lane_C)  # beyond V: dropped
      return out_VD.at[to_C].set(sum_CD, mode='drop', unique_indices=True)

    return jax.lax.fori_loop(0, (count + block - 1) // block, body, out_VD)

  return jax.lax.fori_loop(0, (P + pad) // G, group, jnp.zeros((V, D)))
