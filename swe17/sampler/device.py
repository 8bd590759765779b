"""What an engine has on its device: weights, KV pages, and the programs over them.

Every program has a few shapes, all compiled by `warm_up`. Arrays of a dispatch are
filled here from the scheduler's slots; nothing here decides anything.
"""

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from swe17 import config
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.sampler import check, decode, layout, scheduler

_COPIES = 8  # pages copied in a dispatch
_READ = 4  # pages of routes read in a dispatch


@dataclasses.dataclass(frozen=True)
class Draws:
  """What one dispatch drew for one slot, [n] or [n, K]."""

  token_T: np.ndarray
  logp_T: np.ndarray
  entropy_T: np.ndarray
  kept_TK: np.ndarray
  bound_T: np.ndarray


class Device:
  """Not for several threads. Its cache is overwritten in place by every dispatch."""

  def __init__(
    self,
    params: p.Params,
    model: config.Model,
    cfg: config.Sampler,
    *,
    length: int,
    pages: int,
    K: int,
  ):
    """Args:
    params: values to compute with.
    model: shape.
    cfg: rows, steps and chunk of a dispatch.
    length: positions of the longest context.
    pages: of `cfg.page` positions.
    K: width of recorded sets; 0: none.
    """
    self._model, self._cfg, self._K = model, cfg, K
    self._columns = -(-length // cfg.page)  # of a block table
    self._programs = decode.jitted(model, K, cfg.decode_steps)
    self.prefill_program, self.decode_program = (
      self._programs.prefill,
      self._programs.decode,
    )
    # Committed to its device, as what a program returns is: a program that is given
    # the one and later the other is compiled twice.
    self.cache = jax.device_put(kv.init(model, pages, cfg.page), jax.devices()[0])
    self._pages = pages
    # On CPU a program that slices stacked layers copies them at every dispatch.
    self._apart = jax.default_backend() == 'cpu'
    self._params: p.Params | p.Unstacked | None = None
    self.renew(params)

  def renew(self, params: p.Params) -> None:
    """Computes with these weights from now on."""
    if self._apart:
      old = self._params
      assert not isinstance(old, p.Params)
      self._params = layout.unstacked(params, old, self._model.dtype)
    else:
      self._params = params

  def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies pages, (from, to), in order."""
    for at in range(0, len(pairs), _COPIES):
      from_X = np.zeros(_COPIES, np.int32)
      to_X = np.full(_COPIES, self._pages, np.int32)  # beyond the pool: dropped
      for x, (origin, to) in enumerate(pairs[at : at + _COPIES]):
        from_X[x], to_X[x] = origin, to
      self.cache = self._programs.copy(self.cache, from_X, to_X)

  def prefill(self, tiles: Sequence[scheduler.Tile]) -> None:
    """Makes the entries of these pieces of contexts."""
    R, T = self._cfg.prefill_rows, self._cfg.prefill_chunk
    token_RT = np.zeros((R, T), np.int32)
    position_RT = np.full((R, T), self._columns * self._cfg.page, np.int32)
    table_RJ = np.zeros((R, self._columns), np.int32)
    for r, tile in enumerate(tiles):
      n = tile.stop - tile.start
      token_RT[r, :n] = tile.slot.job.context[tile.start : tile.stop]
      position_RT[r, :n] = np.arange(tile.start, tile.stop)
      self._fill_table(table_RJ[r], tile.slot)
    self.cache = self.prefill_program(
      self._params, self.cache, token_RT, position_RT, table_RJ
    )

  def decode(self, slots: Sequence[scheduler.Slot]) -> list[Draws]:
    """Draws for these slots, as many tokens as a dispatch has steps, or to an end."""
    before = self._rows(slots)
    self.cache, after, draws = self.decode_program(
      self._params, self.cache, decode.Slots(**jax.device_put(before))
    )
    position_B, draws = jax.device_get((after.position_B, draws))
    drawn_B = position_B - before['position_B']
    return [
      Draws(
        draws.token_B[:n, b],
        draws.logp_B[:n, b],
        draws.entropy_B[:n, b],
        draws.kept_ids_BK[:n, b],
        draws.topk_bound_B[:n, b],
      )
      for b, n in enumerate(drawn_B[: len(slots)].tolist())
    ]

  def routes(self, slot: scheduler.Slot, start: int, stop: int) -> np.ndarray | None:
    """Routes of a slot's positions `start` to `stop` (excluded), [R, N, K]."""
    held_PSNK, S = self.cache.routes, self._cfg.page
    if held_PSNK is None:
      return None
    ids = [page.id for page in slot.row.pages[start // S : -(-stop // S)]]
    parts = [np.zeros((0, *held_PSNK.shape[2:]), held_PSNK.dtype)]
    for at in range(0, len(ids), _READ):
      page_X = np.zeros(_READ, np.int32)
      some = ids[at : at + _READ]
      page_X[: len(some)] = some
      rows_XSNK = np.asarray(self._programs.routes(held_PSNK, page_X))
      parts += list(rows_XSNK[: len(some)])
    first = start - start // S * S
    return np.concatenate(parts)[first : first + stop - start]

  def warm_up(self) -> None:
    """Compiles every shape of every program, on rows that write nothing."""
    assert self._params is not None
    for width in self._cfg.widths:
      idle = decode.Slots(**jax.device_put(self._idle(width)))
      self.cache, _, _ = self.decode_program(self._params, self.cache, idle)
    self.prefill([])
    nothing = np.zeros(_COPIES, np.int32), np.full(_COPIES, self._pages, np.int32)
    self.cache = self._programs.copy(self.cache, *nothing)
    if self.cache.routes is not None:
      self._programs.routes(self.cache.routes, np.zeros(_READ, np.int32))
    jax.block_until_ready(self.cache)

  def _fill_table(self, table_J: np.ndarray, slot: scheduler.Slot) -> None:
    pages = slot.row.pages
    table_J[: len(pages)] = [page.id for page in pages]

  def _idle(self, B: int) -> dict[str, np.ndarray]:
    """The fields of `decode.Slots` for B rows that do nothing."""
    return {
      'table_BJ': np.zeros((B, self._columns), np.int32),
      'token_B': np.zeros(B, np.int32),
      'position_B': np.zeros(B, np.int32),
      'left_B': np.zeros(B, np.int32),
      'stop_BX': np.full((B, check.STOPS), -1, np.int32),
      'key_B2': np.zeros((B, 2), np.uint32),
      'temperature_B': np.ones(B, np.float32),
      'top_p_B': np.ones(B, np.float32),
      'min_p_B': np.zeros(B, np.float32),
      'top_k_B': np.ones(B, np.int32),
    }

  def _rows(self, slots: Sequence[scheduler.Slot]) -> dict[str, np.ndarray]:
    """The fields of `decode.Slots`, in the fewest rows that are compiled."""
    a = self._idle(next(w for w in self._cfg.widths if w >= len(slots)))
    for b, slot in enumerate(slots):
      job, request = slot.job, slot.job.request
      s = request.sampling
      self._fill_table(a['table_BJ'][b], slot)
      a['token_B'][b] = job.token[-1] if job.token else request.token_T[-1]
      a['position_B'][b] = slot.row.size
      a['left_B'][b] = job.left
      a['stop_BX'][b, : len(request.stop_ids)] = request.stop_ids
      a['key_B2'][b] = request.key
      a['temperature_B'][b] = s.temperature
      a['top_p_B'][b] = s.top_p
      a['min_p_B'][b] = s.min_p
      a['top_k_B'][b] = s.top_k if s.top_k else max(self._K, 1)
    return a
