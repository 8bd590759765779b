"""What the tests of model, ops and learner share.

Tiny models, scripted segments and groups, and float64 NumPy references, written
from the papers and apart from the code under test.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from swe17 import config, types
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import transformer
from swe17.ops import kept_set

MODEL = config.Model(
  layers=2,
  width=64,
  ffn=96,
  heads=4,
  kv_heads=2,
  head_dim=16,
  rotary_dim=4,
  ngram=3,
  attention_chunk=48,
  unroll=False,
)
VOCAB = 97
# One Newton-Schulz step compiles five times faster than five; the optimiser's own tests
# take five.
OPTIM = config.Optim(lr=0.01, warmup=0, ns_steps=1)


def params(seed: int = 0, sharp: float = 1.0, cfg: config.Model = MODEL) -> p.Params:
  """Random parameters, norms included; logits have a deviation of about `sharp`.

  Drawn and rounded to bfloat16 by NumPy, which has nothing to compile.
  """
  rng = np.random.default_rng(seed)

  def value(leaf: p.Leaf) -> jax.Array:
    x = rng.normal(size=leaf.shape)
    x = x * leaf.scale if leaf.scale else 1 + 0.2 * x
    if leaf.axes[0] == 'vocab':
      x = x * sharp
    return jnp.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))

  return jax.tree.map(value, p.abstract(cfg, VOCAB))


def leaves(tree) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same_bits(a, b) -> bool:
  pairs = zip(leaves(a), leaves(b), strict=True)
  return all(x.tobytes() == y.tobytes() and x.dtype == y.dtype for x, y in pairs)


# References in float64.


def logsumexp64(z: np.ndarray) -> np.ndarray:
  z = np.asarray(z, np.float64)
  top = z.max(-1, keepdims=True)
  return np.log(np.exp(z - top).sum(-1)) + top[..., 0]


def kept64(prob: np.ndarray, *, top_p=1.0, min_p=0.0, top_k=0) -> list[int]:
  """Ids kept, in descending order of probability, ties by id."""
  prob = np.asarray(prob, np.float64)
  order = sorted(range(prob.size), key=lambda i: (-prob[i], i))
  order = [i for i in order if prob[i] >= min_p * prob.max()]
  order = order[: top_k or None]
  total = sum(prob[i] for i in order)
  kept, before = [], 0.0
  for i in order:
    if before >= top_p and top_p < 1:
      break
    kept.append(i)
    before += prob[i] / total
  return kept


def forward64(params: p.Params, token_T: np.ndarray, cfg: config.Model) -> np.ndarray:
  """Logits [T, V] of one sequence, one head and one query at a time."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale

  def rope(x, t):  # [heads, H] at position t: pairs (i, i + R/2) of the first R
    half = cfg.rotary_dim // 2
    angle = t * cfg.rope.theta ** (-np.arange(half) / half)
    turn = (x[:, :half] + 1j * x[:, half : 2 * half]) * np.exp(1j * angle)
    return np.concatenate([turn.real, turn.imag, x[:, 2 * half :]], -1)

  x, T = w.embed_VD[token_T], len(token_T)
  for t in range(T):
    for back in range(1, min(cfg.ngram - 1, t) + 1):
      x[t] = x[t] + w.embed_VD[token_T[t - back]] @ w.prev_JDD[back - 1]
  for n in range(cfg.layers):
    w_n = jax.tree.map(lambda a, n=n: a[n], w.dense)
    h = norm(x, w_n.attn_norm_ND)
    q = [rope(np.tensordot(h[t], w_n.attn.wq_NDQH, 1), t) for t in range(T)]
    k = [rope(np.tensordot(h[t], w_n.attn.wk_NDCH, 1), t) for t in range(T)]
    v = [np.tensordot(h[t], w_n.attn.wv_NDCH, 1) for t in range(T)]
    for t in range(T):
      for head in range(cfg.heads):
        c = head // (cfg.heads // cfg.kv_heads)
        score = np.array([q[t][head] @ k[s][c] for s in range(t + 1)])
        score = score / np.sqrt(cfg.head_dim)
        prob = np.exp(score - logsumexp64(score))
        out = sum(prob[s] * v[s][c] for s in range(t + 1))
        x[t] = x[t] + out @ w_n.attn.wo_NQHD[head]
    h = norm(x, w_n.mlp_norm_ND)
    gate = h @ w_n.mlp.wg_NDF
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w_n.mlp.wu_NDF)) @ w_n.mlp.wd_NFD
  return norm(x, w.norm_D) @ w.embed_VD.T


# Scripted segments, episodes and groups.


def segment(
  rng: np.random.Generator,
  *turns: tuple[int, int],
  width: int = 4,
  vocab: int = VOCAB,
  version: int = 0,
  temperature: float = 1.0,
) -> types.Segment:
  """Turns of (tokens read, tokens sampled). Sets of 1 to `width` ids; 0: no sets."""
  mask_T = np.concatenate([np.repeat([False, True], turn) for turn in turns])
  turn_T = np.concatenate([np.full(sum(t), i, np.int32) for i, t in enumerate(turns)])
  token_T = rng.integers(0, vocab, mask_T.size).astype(np.int32)
  size_T = np.where(mask_T, rng.integers(min(width, 1), width + 1, mask_T.size), 0)
  sets = []
  for token, size in zip(token_T, size_T, strict=True):
    others = np.delete(np.arange(vocab), token)
    chosen = rng.choice(others, max(size - 1, 0), replace=False)
    sets.append(np.sort(np.append(chosen, token))[:size] if size else chosen[:0])
  kept = types.KeptSets(
    np.concatenate([[0], np.cumsum(size_T)]).astype(np.int32),
    np.concatenate(sets).astype(np.int32),
  )
  logp_T = np.where(size_T == 1, 0.0, -rng.uniform(0.2, 2.0, mask_T.size))
  return types.Segment(
    token_T=token_T,
    mask_T=mask_T,
    mu_logp_T=np.where(mask_T, logp_T, 0).astype(np.float32),
    entropy_T=np.where(mask_T, rng.uniform(0.1, 2, mask_T.size), 0).astype(np.float32),
    temperature_T=np.where(mask_T, temperature, 0).astype(np.float32),
    version_T=np.where(mask_T, version, 0).astype(np.int32),
    turn_T=turn_T,
    kept=kept,
  )


def episode(
  segments: types.Segment | tuple[types.Segment, ...],
  value: float | None = 1.0,
  *,
  group: str = '0-a',
  member: int = 0,
  **changes,
) -> types.Episode:
  segments = (segments,) if isinstance(segments, types.Segment) else segments
  made = types.Episode(
    id=f'{group}.{member}',
    task_id=f'task/{group}',
    unit='unit',
    group_id=group,
    member=member,
    status='invalid' if value is None else 'valid',
    outcome=types.Outcome(value, 'the sandbox died' if value is None else ''),
    solved_at=1.0,
    segments=segments,
    turns=1,
    calls=2,
    malformed=0,
    tests=1,
    submitted=True,
    sampled_tokens=int(sum(s.mask_T.sum() for s in segments)),
    thinking_tokens=0,
    tool_seconds=0.5,
    seconds=1.5,
  )
  return dataclasses.replace(made, **changes)


def group(
  start: int = 0,
  values: tuple[float | None, ...] = (1.0, 0.0),
  *,
  seed: int = 0,
  turns: tuple[tuple[int, int], ...] = ((5, 4), (3, 6)),
  attempt: str = 'a',
  **of_segment,
) -> types.Group:
  """A group with one segment an episode; each episode has its own random tokens."""
  rng = np.random.default_rng([seed, start])
  name = f'{start}-{attempt}'
  episodes = [
    episode(segment(rng, *turns, **of_segment), value, group=name, member=i)
    for i, value in enumerate(values)
  ]
  return types.Group(name, start, f'task/{start}', 'unit', tuple(episodes))


@functools.partial(jax.jit, static_argnames='K')
def _draw(params, token_B1, t, cache, key_B, settings, K):
  B = token_B1.shape[0]
  hidden_B1D, cache, _ = transformer.apply_cached(
    params, token_B1, jnp.full((B, 1), t), cache, None, cfg=MODEL
  )
  logits_BV = transformer.logits(params, hidden_B1D)[:, 0]
  return kept_set.draw(key_B, logits_BV, *settings, K), cache


def sample(
  params: p.Params,
  prompt_BT: np.ndarray,
  steps: int,
  sampling: types.Sampling,
  seed: int = 0,
) -> list[types.Segment]:
  """Segments of one turn, drawn token by token through the KV cache."""
  B, P = prompt_BT.shape
  K = VOCAB if sampling.truncates else 0
  cache = kv.init(MODEL, B, P + steps)
  settings = (
    np.full(B, sampling.temperature, np.float32),
    np.full(B, sampling.top_p, np.float32),
    np.full(B, sampling.min_p, np.float32),
    np.full(B, sampling.top_k or VOCAB, np.int32),
  )
  draws, token_B1 = [], prompt_BT[:, :1]
  for t in range(P + steps - 1):
    key_B = jax.random.split(jax.random.key(seed * 1000 + t), B)
    draw, cache = _draw(params, token_B1, t, cache, key_B, settings, K)
    if t + 1 < P:
      token_B1 = prompt_BT[:, t + 1 : t + 2]
    else:
      draws.append(jax.device_get(draw))
      token_B1 = draws[-1].token_B[:, None]
  out = []
  for b in range(B):
    ids = [np.sort(d.kept_ids_BK[b][d.kept_ids_BK[b] >= 0]) for d in draws]
    size_T = np.array([0] * P + [len(x) for x in ids])
    zero = np.zeros(P, np.float32)
    out.append(
      types.Segment(
        token_T=np.append(prompt_BT[b], [d.token_B[b] for d in draws]).astype(np.int32),
        mask_T=np.arange(P + steps) >= P,
        mu_logp_T=np.append(zero, [d.logp_B[b] for d in draws]).astype(np.float32),
        entropy_T=np.append(zero, [d.entropy_B[b] for d in draws]).astype(np.float32),
        temperature_T=np.where(
          np.arange(P + steps) >= P, sampling.temperature, 0
        ).astype(np.float32),
        version_T=np.zeros(P + steps, np.int32),
        turn_T=np.zeros(P + steps, np.int32),
        kept=types.KeptSets(
          np.append(0, np.cumsum(size_T)).astype(np.int32),
          np.concatenate(ids).astype(np.int32),
        ),
      )
    )
  return out
