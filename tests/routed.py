"""A model whose routers hash, an engine that serves it, and an agent's record of it.

Token t goes to experts t + n and t + n + 1 (mod E) in layer n: whose row is whose can
be read off anywhere (CASES 9.2).
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, config_model, types, wire
from swe17.agent import formats, record
from swe17.model import params as p
from swe17.sampler import decode, engine
from tests import fixtures

E, K, N, V, LENGTH = 6, 2, 2, fixtures.VOCAB, 64
WAIT = 60.0  # s; only a hang takes that long
MODEL = config.Model(
  layers=3,
  width=16,
  ffn=16,
  heads=2,
  kv_heads=2,
  head_dim=8,
  rotary_dim=4,
  ngram=1,
  unroll=False,
  moe=config_model.Moe(experts=E, active=K, ffn=8, first_dense=1),
)
SAMPLER = config.Sampler(
  slots=2,
  decode_steps=4,
  prefill_rows=2,
  prefill_chunk=8,
  page=16,
  top_k=0,
  top_p=1.0,
  poll_seconds=0.01,
)


@pytest.fixture(scope='module', autouse=True)
def compiled_once():
  """Engines of equal shapes share their compiled programs."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decode, 'jitted', functools.cache(decode.jitted))
    yield


def hashed(token: np.ndarray, turned: int = 0, experts: int = E) -> np.ndarray:
  """The routes of tokens [..., N, K] in a model whose routers are turned by so many."""
  at = np.asarray(token)[..., None] + np.arange(N) + turned
  return np.stack([at % experts, (at + 1) % experts], axis=-1)


@functools.cache
def hashing(turned: int = 0, cfg: config.Model = MODEL) -> p.Params:
  """Weights whose layers add nothing, so that routers see the token's embedding."""
  made = fixtures.params(cfg=cfg)
  experts, D = cfg.moe.experts, cfg.width
  embed = np.zeros((V, D), np.float32)
  for i in range(V):
    embed[i, i % experts], embed[i, (i + 1) % experts] = 2.0, 1.0
  router = np.zeros((N, D, experts), np.float32)
  for n in range(N):
    for d in range(experts):
      router[n, d, (d + n + turned) % experts] = 1.0

  def silent(layers: p.Layers | None) -> p.Layers:
    assert layers is not None and isinstance(layers.attn, p.Gqa)
    attn = dataclasses.replace(layers.attn, wo_NQHD=0 * layers.attn.wo_NQHD)
    # Norms that weigh no dimension more keep the order of scores.
    norm_ND = jnp.ones_like(layers.mlp_norm_ND)
    return dataclasses.replace(layers, attn=attn, mlp_norm_ND=norm_ND)

  dense, moe = silent(made.dense), silent(made.moe)
  assert isinstance(dense.mlp, p.Dense) and isinstance(moe.mlp, p.Moe)
  dense = dataclasses.replace(
    dense, mlp=dataclasses.replace(dense.mlp, wd_NFD=0 * dense.mlp.wd_NFD)
  )
  mlp = dataclasses.replace(
    moe.mlp, router_NDE=jnp.asarray(router), wd_NEFD=0 * moe.mlp.wd_NEFD
  )
  moe = dataclasses.replace(moe, mlp=mlp)
  return dataclasses.replace(made, embed_VD=jnp.asarray(embed), dense=dense, moe=moe)


@contextlib.contextmanager
def serving(
  params: p.Params | None = None,
  swap: Callable[[], tuple[p.Params, int] | None] = lambda: None,
  cfg: config.Sampler = SAMPLER,
  model: config.Model = MODEL,
) -> Iterator[engine.Engine]:
  values = hashing() if params is None else params
  made = engine.Engine(values, 0, model=model, cfg=cfg, length=LENGTH, swap=swap)
  made.start()
  try:
    yield made
  finally:
    made.close()


def prompt(size: int, seed: int = 0) -> list[int]:
  return np.random.default_rng(seed).integers(0, V, size).tolist()


class Talk:
  """A segment of an episode: turns asked of an engine, recorded as the agent does."""

  def __init__(self, made: engine.Engine, session: str):
    self._engine, self._session = made, session
    self.log = record.Record(formats.load(), lambda: 0.0)
    self.answers: list[types.GenerateResult] = []

  def turn(self, read: int, new: int) -> types.GenerateResult:
    seed = 10 * len(self.answers) + len(self._session)
    self.log.given(prompt(read, seed))
    request = types.GenerateRequest(
      session=self._session,
      token_T=np.array(self.log.token, np.int32),
      max_new=new,
      stop_ids=(),
      sampling=SAMPLER.sampling,
      key=(7, len(self._session)),
      routes_from=self.log.routed,
    )
    result = self._engine.submit(request).result(WAIT)
    # As both cross a process boundary.
    assert wire.bytes_to_request(wire.request_to_bytes(request)).routes_from == (
      request.routes_from
    )
    result = wire.bytes_to_result(wire.result_to_bytes(result))
    record.check_result(result, request, V)
    self.log.sampled(result, len(self.answers), 1.0)
    self.answers.append(result)
    return result

  def turns(self, *sizes: tuple[int, int]) -> types.Segment:
    for read, new in sizes:
      self.turn(read, new)
    return self.log.segment()


def rows(of: types.Segment | types.GenerateResult) -> np.ndarray:
  assert of.routes_RNK is not None
  return of.routes_RNK
