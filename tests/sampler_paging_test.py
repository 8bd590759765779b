"""Pages in the engine: groups, few pages, swaps, replays, other families of model."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from swe17 import config, config_model, types
from swe17.model import params as p
from swe17.model import transformer
from swe17.sampler import engine, layout
from tests import sampler_engine_test as engines
from tests.sampler_engine_test import answers, ask, FILTERED, prompt, serving, WAIT

compiled_once = engines.compiled_once
FEW = dataclasses.replace(FILTERED, kv_pages=12)  # 96 positions for all


def exactly(a: types.GenerateResult, b: types.GenerateResult) -> None:
  """The same bits."""
  for name in ('token_T', 'logp_T', 'entropy_T', 'version_T'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
  np.testing.assert_array_equal(a.kept.ids, b.kept.ids)
  np.testing.assert_array_equal(a.kept.offset_T1, b.kept.offset_T1)
  assert a.finish == b.finish


def test_a_groups_prompt_is_prefilled_once_and_each_member_draws_as_alone():
  group = [ask(str(m), token_T=prompt(45), key=(3, m), max_new=12) for m in range(8)]
  with serving() as made:
    together = answers(made, *group)
    counted = made.counters()
  assert counted['prompt_tokens_prefilled'] == 44
  assert counted['prompt_tokens_cached'] == 7 * 44
  assert counted['compilations'] == 0
  assert len({tuple(r.token_T.tolist()) for r in together}) > 1
  with serving() as made:
    for m in (0, 5):
      exactly(answers(made, group[m])[0], together[m])
      made._scheduler.renew(recompute=True)


def test_an_episode_alone_replays_bit_for_bit_what_it_was_in_a_full_batch():
  """Mixed lengths, three turns, a prefix that all share and one that half share."""

  def turn(m: int, before: list[types.GenerateResult]) -> types.GenerateRequest:
    token_T = np.concatenate([prompt(9), prompt(3 + m % 2, m % 2), prompt(m, m)])
    for i, result in enumerate(before):
      token_T = np.concatenate([token_T, result.token_T, prompt(2, i)])
    return ask(str(m), token_T=token_T.astype(np.int32), key=(m, 7), max_new=5 + m % 3)

  with serving() as made:
    episodes: list[list[types.GenerateResult]] = [[] for _ in range(8)]
    for _ in range(3):
      asked = [turn(m, episodes[m]) for m in range(8)]
      for m, result in enumerate(answers(made, *asked)):
        episodes[m].append(result)
  for m in (1, 6):
    with serving() as made:
      before: list[types.GenerateResult] = []
      for recorded in episodes[m]:
        before += answers(made, turn(m, before))
        exactly(before[-1], recorded)


def test_with_few_pages_all_are_served_and_draw_what_they_would_have():
  asked = [ask(str(m), token_T=prompt(20, m), key=(m, 1), max_new=30) for m in range(6)]
  with serving(cfg=FEW) as made:
    few = answers(made, *asked)
    counted = made.counters()
    assert counted['preemptions'] > 0
    assert counted['compilations'] == 0
    assert made.busy == counted['pages_used'] == 0
  with serving() as made:
    for a, b in zip(few, answers(made, *asked), strict=True):
      engines.same(a, b)


def test_a_request_that_could_never_have_its_pages_is_refused():
  cfg = dataclasses.replace(FILTERED, kv_pages=3)
  made = engine.Engine(
    engines.weights(0),
    0,
    model=engines.MODEL,
    cfg=cfg,
    length=engines.LENGTH,
    swap=lambda: None,
  )
  with pytest.raises(ValueError, match='max_new: got 16 after 11 context tokens'):
    made.submit(ask())
  made.submit(ask(max_new=13))
  made.close()


def test_with_recompute_tokens_after_a_swap_are_those_of_a_cold_engine():
  swap = engines.Publishing(after=5)
  cfg = dataclasses.replace(FILTERED, on_swap='recompute')
  request = ask(max_new=20)
  with serving(swap=swap, cfg=cfg) as made:
    swap.made = made
    (result,) = answers(made, request)
    assert made.counters()['preemptions'] == 0
  cut = int(np.argmax(result.version_T))
  assert 0 < cut < 20 and (result.version_T[cut:] == 1).all()
  logp_T = engines.learner(request, result, engines.weights(1))[1]
  np.testing.assert_allclose(logp_T[cut:], result.logp_T[cut:], atol=1e-5)


def test_with_drain_running_requests_end_first_and_none_starts():
  swap, due = engines.Publishing(after=0), []
  cfg = dataclasses.replace(FILTERED, on_swap='drain', slots=2)
  made = engine.Engine(
    engines.weights(0),
    0,
    model=engines.MODEL,
    cfg=cfg,
    length=engines.LENGTH,
    swap=lambda: swap() if due else None,
    pending=lambda: bool(due) and not swap.done,
  )
  swap.made = made
  made.start()
  try:
    running = made.submit(ask('a', max_new=40), lambda _: due.append(True))
    later = [made.submit(ask(str(i))) for i in range(3)]
    assert (running.result(WAIT).version_T == 0).all()
    # One started beside the first; of no answer are some tokens of each version.
    versions = [set(f.result(WAIT).version_T.tolist()) for f in later]
    assert {1} in versions and all(len(v) == 1 for v in versions)
  finally:
    made.close()
  with pytest.raises(ValueError, match='drain'):
    engine.Engine(
      engines.weights(0),
      0,
      model=engines.MODEL,
      cfg=cfg,
      length=engines.LENGTH,
      swap=lambda: None,
    )


def test_fewer_rows_are_decoded_for_fewer_requests_and_nothing_is_compiled_later():
  cfg = dataclasses.replace(FILTERED, decode_widths='1,3')
  with serving(cfg=cfg) as made:
    rows, real = [], made._device.decode_program

    def spied(params, cache, slots):
      rows.append(slots.token_B.size)
      return real(params, cache, slots)

    made._device.decode_program = spied
    (alone,) = answers(made, ask('a', max_new=4))
    two = answers(made, ask('a', max_new=4), ask('b', max_new=4))
    answers(made, *(ask(str(m), max_new=4) for m in range(8)))
    assert rows[0] == 1 and 3 in rows and 8 in rows
    assert made.counters()['compilations'] == 0
  engines.same(alone, two[0])


FAMILIES = {
  'mla': config.Model(
    layers=2,
    width=32,
    ffn=32,
    attention='mla',
    heads=4,
    kv_heads=4,
    head_dim=16,
    rotary_dim=8,
    mla=config_model.Mla(kv_rank=12, v_dim=8),
    ngram=1,
    tied=False,
  ),
  'moe': config.Model(
    layers=2,
    width=32,
    ffn=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rotary_dim=8,
    moe=config_model.Moe(experts=4, active=2, ffn=16, first_dense=1),
  ),
}


@pytest.mark.parametrize('family', FAMILIES)
def test_other_families_draw_in_pages_what_the_learner_scores(family):
  model = FAMILIES[family]
  params = p.rounded(p.init(p.abstract(model, engines.V), jax.random.key(0)))
  made = engine.Engine(
    params,
    0,
    model=model,
    cfg=engines.WHOLE,
    length=engines.LENGTH,
    swap=lambda: None,
  )
  made.start()
  asked = [
    ask(str(m), token_T=prompt(21), key=(m, 1), sampling=types.Sampling(), max_new=9)
    for m in range(3)
  ]
  try:
    results = answers(made, *asked)
    assert made.counters()['prompt_tokens_prefilled'] == 20
  finally:
    made.close()
  score = jax.jit(functools.partial(transformer.apply, cfg=model))
  for result in results:
    token_T = np.concatenate([prompt(21), result.token_T])
    hidden = score(
      params, token_T[None], np.arange(30)[None], np.ones((1, 30), np.int32)
    )
    logp_TV = jax.nn.log_softmax(transformer.logits(params, hidden)[0], axis=-1)
    want_T = np.asarray(logp_TV)[np.arange(20, 29), result.token_T]
    np.testing.assert_allclose(result.logp_T, want_T, atol=1e-5)
    assert (result.routes_RNK is None) == (family == 'mla')


def test_weights_laid_out_for_decoding_are_the_same_and_take_the_place_of_the_old():
  first = layout.unstacked(engines.weights(0), None, 'float32')
  second = layout.unstacked(engines.weights(1), first, 'float32')
  assert jax.tree.leaves(first.layers)[0].is_deleted()
  for got, want in zip(second.layers, p.layers(engines.weights(1)), strict=True):
    np.testing.assert_array_equal(got.attn_norm_ND, want.attn_norm_ND)
    np.testing.assert_array_equal(got.mlp.wg_NDF.w, want.mlp.wg_NDF.T)
    q_QHD = np.moveaxis(np.asarray(want.attn.wq_NDQH), 0, 2)
    np.testing.assert_array_equal(got.attn.wq_NDQH.w, q_QHD)
    o_DO = np.asarray(want.attn.wo_NQHD).reshape(64, 64).T
    np.testing.assert_array_equal(got.attn.wo_NQHD.w, o_DO)
