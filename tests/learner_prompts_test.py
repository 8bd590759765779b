"""Shared prompts: the same numbers as without, in fewer tokens."""

import dataclasses
import functools

from hypothesis import given, settings, strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, config_model, types
from swe17.learner import batching, packing, prompts, replay, update
from swe17.learner import state as st
from swe17.model import transformer
from tests import fixtures, routed

T, K = 64, 4
SHARED = config.Batch(row_length=T, micro_rows=2)
ALONE = dataclasses.replace(SHARED, share_prompts=False)

MODELS = {
  'dense': dataclasses.replace(fixtures.MODEL, attention_chunk=40),
  'routed': dataclasses.replace(
    routed.MODEL,
    attention_chunk=40,
    layers=2,
    moe=dataclasses.replace(routed.MODEL.moe, first_dense=0),
  ),
  'latent': dataclasses.replace(
    fixtures.MODEL,
    attention_chunk=40,
    ngram=1,
    attention='mla',
    kv_heads=4,
    rotary_dim=4,
    mla=config_model.Mla(q_rank=8, kv_rank=8, v_dim=4),
  ),
}


def group(
  prompt: int,
  tails: tuple[tuple[tuple[int, int], ...], ...],
  seed: int = 0,
  routes: tuple[int, int, int] | None = None,
) -> list[types.Segment]:
  """Segments with `prompt` first tokens in common, and turns of their own."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, fixtures.VOCAB, prompt).astype(np.int32)
  routes_PNK = None
  made = []
  for (read, drawn), *more in tails:
    s = fixtures.segment(rng, (prompt + read, drawn), *more)
    token_T = np.append(ids, s.token_T[prompt:]).astype(np.int32)
    if routes is not None:
      # The end was never fed through the sampler.
      size = (s.token_T.size - 2, *routes[:2])
      routes_RNK = rng.integers(0, routes[2], size).astype(np.uint8)
      routes_RNK[..., 1] = (routes_RNK[..., 0] + 1) % routes[2]
      routes_PNK = routes_RNK[:prompt] if routes_PNK is None else routes_PNK
      routes_RNK[:prompt] = routes_PNK
      s = dataclasses.replace(s, routes_RNK=routes_RNK)
    made.append(dataclasses.replace(s, token_T=token_T))
  return made


# Two groups, and a segment like no other. The first read nothing but the prompt.
def items(routes: tuple[int, int, int] | None = None) -> list[batching.Item]:
  one = group(22, (((0, 8), (3, 4)), ((0, 5),), ((0, 3), (2, 6)), ((0, 9),)), 1, routes)
  two = group(30, (((2, 4),), ((1, 7),), ((4, 4), (1, 2))), 2, routes)
  other = group(9, (((3, 8),),), 3, routes)
  adv = (1.0, -0.5, 0.25, -0.75, 2.0)
  return [
    batching.Item(s, adv[i % 5], f'e{i}') for i, s in enumerate([*one, *two, *other])
  ]


def fill(made: list[batching.Item], cfg: config.Batch, **changes) -> st.Batch:
  defaults = {'micro': 4, 'K': K, 'denominator': 100.0}
  return batching.fill(made, cfg=cfg, **{**defaults, **changes})


def whole(batch: st.Batch) -> dict[bytes, dict[str, np.ndarray]]:
  """Every segment put together from its prefix and its tail, by its inputs."""
  found = {}
  arrays = {k: v for k, v in vars(batch).items() if np.ndim(v) > 2}
  rows = {k: np.asarray(v).reshape(-1, *v.shape[2:]) for k, v in arrays.items()}
  for r, segment_T in enumerate(rows['segment_MBT']):
    prefix_T = rows['prefix_MBT'][r]
    for j in sorted(set(segment_T.tolist()) - {0} - set(prefix_T.tolist())):
      own = segment_T == j
      (of,) = set(prefix_T[own].tolist())
      at = np.append(np.flatnonzero((segment_T == of) & (of > 0)), np.flatnonzero(own))
      found[rows['token_MBT'][r][at].tobytes()] = {k: v[r][at] for k, v in rows.items()}
  return found


# Who shares what.


def test_a_prompt_is_held_once_and_every_segment_is_whole():
  made = items()
  batch = fill(made, SHARED)
  got = whole(batch)
  assert len(got) == len(made)
  for item in made:
    s, part = item.segment, got[item.segment.token_T[:-1].tobytes()]
    assert part['position_MBT'].tolist() == list(range(s.token_T.size - 1))
    assert part['target_MBT'].tolist() == s.token_T[1:].tolist()
    assert part['mask_MBT'].tolist() == s.mask_T[1:].tolist()
    assert part['mu_logp_MBT'].tolist() == s.mu_logp_T[1:].tolist()
    assert part['adv_MBT'].tolist() == item.adv_T().astype(np.float32).tolist()
  held = int((batch.segment_MBT > 0).sum())
  # Prefixes of 21 and 29, one less than the prompts.
  assert held == sum(i.segment.token_T.size - 1 for i in made) - 3 * 21 - 2 * 29
  assert not batch.mask_MBT[np.isin(batch.segment_MBT, [0])].any()


def test_the_last_common_token_is_the_first_of_every_tail():
  one, two = group(20, (((0, 4),), ((0, 4),)))
  batch = fill([batching.Item(one, 1.0), batching.Item(two, -1.0)], SHARED)
  tails = batch.prefix_MBT > 0
  first = tails & (batch.position_MBT == 19)
  assert first.sum() == 2
  assert (batch.token_MBT[first] == one.token_T[19]).all()
  assert set(batch.target_MBT[first]) == {one.token_T[20], two.token_T[20]}
  assert batch.mask_MBT[first].all() and not batch.mask_MBT[~tails].any()


def test_what_was_sampled_is_never_shared():
  # Equal to the end; the first token was sampled at 20.
  one = group(20, (((0, 6), (30, 2)),))[0]
  (of,) = prompts.shared([one, one], 200)
  assert of == prompts.Shared(19, (0, 1))


def test_a_prefix_needs_a_least_length():
  short, long = (group(n, (((0, 4),), ((0, 4),))) for n in (16, 17))
  assert {s.prefix for s in prompts.shared(short, T)} == {0}
  assert {s.prefix for s in prompts.shared(long, T)} == {16}


def test_sets_are_cut_where_most_is_saved():
  """A system prompt of 20 in common with all, tasks of 30 more with three each."""
  made = [*group(50, (((0, 4),),) * 3, 1), *group(50, (((0, 4),),) * 3, 2)]
  system = made[0].token_T[:20]
  made = [
    dataclasses.replace(s, token_T=np.append(system, s.token_T[20:])) for s in made
  ]
  order = [0, 3, 1, 4, 2, 5]
  got = prompts.shared([made[i] for i in order], 1000)
  want = {prompts.Shared(49, (0, 2, 4)), prompts.Shared(49, (1, 3, 5))}
  assert set(got) == want
  # Alone in their tasks, they share the system prompt.
  assert prompts.shared([made[0], made[3]], 1000) == [prompts.Shared(19, (0, 1))]


def test_routes_that_differ_end_the_prefix():
  model = MODELS['routed']
  one, two = group(30, (((0, 4),), ((0, 4),)), routes=model.routes)
  assert prompts.shared([one, two], T, model.routes)[0].prefix == 29
  assert one.routes_RNK is not None
  # Those of the last common token are of an input of the tails.
  for at, prefix in ((29, 29), (28, 28), (20, 20)):
    routes_RNK = one.routes_RNK.copy()
    routes_RNK[at] = (routes_RNK[at] + 1) % model.moe.experts
    other = dataclasses.replace(one, routes_RNK=routes_RNK)
    assert prompts.shared([other, two], T, model.routes)[0].prefix == prefix
    assert prompts.shared([other, two], T)[0].prefix == 29
  none = dataclasses.replace(one, routes_RNK=None)
  assert len(prompts.shared([none, two], T, model.routes)) == 2


def test_a_tail_that_does_not_fit_takes_a_copy_of_the_prefix_along():
  made = group(30, (((0, 20),),) * 4)
  batch = fill([batching.Item(s, 1.0, str(i)) for i, s in enumerate(made)], SHARED)
  # 29 + 20 leaves no room for a second tail of 20 in a row of 64: no row is saved.
  assert batch.micro == 2 and len(whole(batch)) == 4
  wide = dataclasses.replace(SHARED, row_length=90)
  batch = fill([batching.Item(s, 1.0, str(i)) for i, s in enumerate(made)], wide)
  assert batch.micro == 1
  assert ((batch.segment_MBT > 0).sum(-1) == 29 + 3 * 20).any()


def test_where_prompts_count_and_with_the_setting_off_nothing_is_shared():
  made = items()
  assert fill(made, SHARED, context_weight=0.0).prefix_MBT.any()
  assert fill(made, ALONE).prefix_MBT is None
  assert fill(made, SHARED, context_weight=0.1).prefix_MBT is None
  same = fill(made, SHARED, context_weight=0.1)
  assert fixtures.same_bits(same, fill(made, ALONE, context_weight=0.1))


@settings(max_examples=40, deadline=None)
@given(
  strategies.lists(
    strategies.tuples(
      strategies.integers(0, 40),  # of the common ids
      strategies.integers(0, 3),  # what they go on with
      strategies.integers(1, 6),
      strategies.integers(1, 9),
    ),
    min_size=1,
    max_size=24,
  )
)
def test_any_segments_are_packed_once_and_overfill_no_row(sizes):
  ids = np.arange(40, dtype=np.int32)
  made = []
  for i, (common, branch, read, drawn) in enumerate(sizes):
    s = fixtures.segment(np.random.default_rng(i), (common + read, drawn))
    token_T = s.token_T.copy()
    token_T[:common] = ids[:common]
    token_T[common] = 50 + branch
    made.append(dataclasses.replace(s, token_T=token_T))
  lengths = [s.token_T.size - 1 for s in made]
  sets = prompts.shared(made, T)
  assert sorted(i for s in sets for i in s.members) == list(range(len(made)))
  for s in sets:
    heads = {made[i].token_T[: s.prefix + 1].tobytes() for i in s.members}
    assert len(heads) == 1 or not s.prefix
  laid, found = packing.layout(made, SHARED)
  assert len(laid) <= len(packing.pack(lengths, T))
  for rows, of in ((packing.pack(lengths, T, sets), sets), (laid, found)):
    assert sorted(i for row in rows for i in row) == list(range(len(made)))
    held = packing.held(rows, lengths, of)
    assert all(inputs <= T and count <= 64 for inputs, count in held)


def test_a_set_is_dealt_out_evenly_where_that_takes_fewer_rows():
  # First fit puts the two longest together, which leaves ten places empty.
  sets = [prompts.Shared(20, tuple(range(6)))]
  lengths = [20 + n for n in (20, 20, 15, 15, 15, 15)]
  assert len(packing.pack(lengths, 70, sets)) == 3
  rows = packing.bundled(lengths, 70, sets)
  assert packing.held(rows, lengths, sets) == [(70, 4), (70, 4)]


# The same numbers.


def lose(params, micro: st.Batch, model: config.Model) -> jax.Array:
  """A loss of every trained token's own, by the step's forward pass."""
  hidden_BTD, _ = update._hidden(params, micro, model, replay.recorded(micro))
  logp_BTV = jax.nn.log_softmax(transformer.logits(params, hidden_BTD))
  logp_BT1 = jnp.take_along_axis(logp_BTV, micro.target_MBT[:, :, None], axis=-1)
  return jnp.sum(jnp.where(micro.mask_MBT, logp_BT1[..., 0] * micro.adv_MBT, 0))


@functools.partial(jax.jit, static_argnums=2)
def gradient(params, batch: st.Batch, model: config.Model):
  micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
  return jax.value_and_grad(lose)(params, micro, model)


@pytest.mark.parametrize('name', MODELS)
def test_loss_and_gradient_are_those_of_whole_segments(name):
  """In float64, but for norms and hidden states, which are float32."""
  model = MODELS[name]
  batches = [
    fill(items(model.routes), dataclasses.replace(cfg, micro_rows=6), micro=1,
         routes=model.routes)
    for cfg in (SHARED, ALONE)
  ]  # fmt: skip
  rows = [int((b.segment_MBT > 0).any(-1).sum()) for b in batches]
  assert rows[0] < rows[1]
  none = np.zeros_like(batches[1].segment_MBT)
  batches[1] = dataclasses.replace(batches[1], prefix_MBT=none)  # compiled once
  with jax.enable_x64(True):
    params = jax.tree.map(
      lambda w: jnp.asarray(w, jnp.float64), fixtures.params(cfg=model)
    )
    got, want = (gradient(params, jax.tree.map(jnp.asarray, b), model) for b in batches)
  assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-7)
  for a, b in zip(fixtures.leaves(got[1]), fixtures.leaves(want[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def test_a_shared_prompt_counts_for_each_of_its_segments_in_the_routers_load():
  routes = MODELS['routed'].routes
  assert routes is not None
  table = np.random.default_rng(0).integers(
    0, routes[2], (fixtures.VOCAB, T, *routes[:2])
  )
  found = []
  for cfg in (SHARED, ALONE):
    batch = fill(items(routes), cfg, routes=routes)
    total = []
    for i in range(int(batch.micro)):
      micro = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]) if np.ndim(x) else x, batch)
      top = jnp.asarray(table[micro.token_MBT, micro.position_MBT])
      total.append(replay.statistics(top, micro, routes[2]))
    found.append(jax.tree.map(lambda *x: np.sum(np.stack(x), axis=0), *total))
  assert fixtures.same_bits(*found)
  assert found[0].differ > 0 and found[0].recorded > found[0].differ
