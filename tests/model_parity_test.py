"""Every family against `transformers`, from files that it saved: logits and gradients.

Long before a logit is visibly wrong a model learns worse, so the bound is tight: 2e-5
in float32, at positions where position, packing and routing all matter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from swe17 import config
from swe17.model import cache as kv
from swe17.model import load, names, source, transformer
from tests import parity

T, V = parity.T, parity.VOCAB
POSITIONS = (0, 1, 17, 63)


@dataclasses.dataclass(frozen=True)
class Pair:
  """A saved model on both sides."""

  theirs: transformers.PreTrainedModel
  params: object
  cfg: config.Model
  opened: source.Opened


@pytest.fixture(scope='module', params=list(parity.CASES))
def pair(request, tmp_path_factory) -> Pair:
  folder = tmp_path_factory.mktemp(request.param)
  theirs = parity.save(request.param, folder)
  cfg = source.settle(config.Model(source=str(folder), unroll=False))
  params = load.load(cfg.source, cfg)
  return Pair(theirs, params, cfg, source.open(cfg.source))


# Compiling takes most of the time here; unoptimised it takes half.
QUICK = {'xla_backend_optimization_level': 0}


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK)
def run(params, token_BT, position_BT, segment_BT, cfg):
  """(logits, loss of the first row, its gradient)."""

  def loss(params):
    h = transformer.apply(params, token_BT, position_BT, segment_BT, cfg=cfg)
    logits_BTV = transformer.logits(params, h)
    logp_TV = jax.nn.log_softmax(logits_BTV[0, :-1])
    return -jnp.mean(logp_TV[jnp.arange(T - 1), token_BT[0, 1:]]), logits_BTV

  (value, logits_BTV), gradient = jax.value_and_grad(loss, has_aux=True)(params)
  return logits_BTV, value, gradient


step = jax.jit(transformer.apply_cached, static_argnames='cfg', compiler_options=QUICK)


def rows(*each: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, ...]:
  """Rows with sequences at their offsets: token, position, segment [B, T]."""
  token, position, segment = (np.zeros((len(each), T), np.int32) for _ in range(3))
  for b, row in enumerate(each):
    for i, (at, ids) in enumerate(row):
      to = slice(at, at + ids.size)
      token[b, to], segment[b, to] = ids, i + 1
      position[b, to] = np.arange(ids.size)
  return token, position, segment


def close(got, want) -> None:
  np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-5)


def test_logits_and_every_gradient_are_those_of_transformers(pair):
  a, b = parity.tokens(1), parity.tokens(2)
  got, loss, gradient = run(pair.params, *rows([(0, a)], [(0, b)]), pair.cfg)
  for row, ids in zip(got, (a, b), strict=True):
    want = parity.logits(pair.theirs, ids)
    assert np.abs(want).max() > 3  # no trivial ones
    close(row[np.array(POSITIONS)], want[np.array(POSITIONS)])
    close(row, want)
  want_loss, want_gradient = parity.gradients(pair.theirs, a)
  assert abs(float(loss) - want_loss) < 2e-5
  named = load.by_name(gradient)
  present = pair.theirs.state_dict().keys()
  table = names.table(
    pair.cfg, V, names.HF, present, interleaved=pair.opened.described.interleaved
  )
  found: dict[str, np.ndarray] = {}
  for part in table:
    tensor = found.setdefault(part.tensor, np.full(part.tensor_shape, np.nan))
    part.into(tensor, np.asarray(named[part.leaf][part.at]))
  buffers = {name for name in found if name.endswith('e_score_correction_bias')}
  assert found.keys() - buffers == want_gradient.keys()
  for name in buffers:
    assert not found[name].any()  # it selects only
  for name, want in want_gradient.items():
    largest = np.abs(want).max()
    assert largest > 0, name
    assert np.abs(found[name] - want).max() <= 1e-4 * largest, name


def test_packed_and_left_and_right_padded_rows_score_as_alone(pair):
  a, b, c = parity.tokens(3, 27), parity.tokens(4, 37), parity.tokens(5, 41)
  for grid in (
    ([(0, a), (27, b)], [(T - 41, c)]),  # packed; left-padded
    ([(0, c)], [(5, b)]),  # right-padded; in between
  ):
    got = np.asarray(run(pair.params, *rows(*grid), pair.cfg)[0])
    for row, sequences in zip(got, grid, strict=True):
      for at, ids in sequences:
        close(row[at : at + ids.size], parity.logits(pair.theirs, ids))


def test_prefill_and_token_by_token_decode_score_as_the_whole(pair):
  """Both rows at once: one from its first token, one after a prefill of 40."""
  token = np.stack([parity.tokens(1), parity.tokens(2)])
  position = np.tile(np.arange(T, dtype=np.int32), (2, 1))
  cache = kv.init(pair.cfg, 2, T)
  found = []
  for start, end in ((0, 40), *((t, t + 1) for t in range(40, T))):
    h, cache, _ = step(
      pair.params,
      token[:, start:end],
      position[:, start:end],
      cache,
      None,
      cfg=pair.cfg,
    )
    found.append(np.asarray(transformer.logits(pair.params, h)))
  got = np.concatenate(found, axis=1)
  for row, ids in zip(got, token, strict=True):
    close(row, parity.logits(pair.theirs, ids))
