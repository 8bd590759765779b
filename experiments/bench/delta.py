"""What a weight update takes on the wire, and how fast it is coded and applied.

  python -m experiments.bench.delta [--params=1e9 --run=RUN_FOLDER --steps=6]

Synthetic part: `params` bfloat16 weights, N(0, .02) in float32 masters, moved by a
uniform update of up to lr, for lr 1e-7, 1e-6 and 1e-5, made and measured block by block
(4 MiB), so that memory does not depend on `params`. Codecs take turns on each block, on
one thread. Rates are full bytes of bfloat16 per second of that thread's CPU time, so
that what else the machine does counts only by way of caches and clocks; they are
medians over blocks, and ratios are those of medians. `encode` is the codec alone;
`apply` decodes on the base into a buffer that exists, before verification; `verified`
adds the sha256 of the stored and the xxh3-128 of the resulting bytes. xor compresses
with zstd level 3.

`bound` is the order-0 entropy: with N elements of which C changed, each by a distance z
of representable numbers,

  N H(C / N) + C H(z | changed)      H(p) = -p log2 p - (1 - p) log2(1 - p)

bits, one C / N and one histogram of z for the whole set. Coding positions and distances
apart, each element by itself, can't take less; `ulp_ctx` does, since it tells elements
apart by their exponent.

Real part: consecutive versions of a run (`--run`, its folder or the URL of its store),
as they would be published; without it, of `steps` Muon steps of the quickstart's model
at its learning rate on random tokens (`--steps=0`: none). There the bound is taken over
each version as a whole: blocks that differ in density may go below it.

Ends with a line of JSON, at lr 1e-6 on the synthetic set (`real`: the other part):

  {"ulp_vs_xor": .., "ulp_vs_bound": .., "encode_vs_xor": .., "apply_gb_per_s_core": ..,
   "share_of_full": .., ..}

Exit code 1 unless ulp takes at most .55 of xor, 1.15 of the bound and .015 of the full
bytes, encodes at least as fast as xor and applies at 1 GB/s or more. Hardware: one CPU
core; three minutes at 1e9 if it is idle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import TypeVar

from absl import flags
import ml_dtypes
import numpy as np
from rich import box, console, table

from experiments.bench import delta_weights
from swe17 import config
from swe17.store import kv
from swe17.sync import codec, manifest, pack, streams, ulp

RATES = (1e-7, 1e-6, 1e-5)
JUDGED = 1e-6
CODECS = ('xor', 'ulp', 'ulp_ctx')
MOST_PAIRS = 8  # versions of a real run that are looked at
_DTYPE = 'bfloat16'
_BF16 = np.dtype(ml_dtypes.bfloat16)
_SETTINGS = config.Sync()
BLOCK = _SETTINGS.block_bytes // _BF16.itemsize  # weights

_T = TypeVar('_T')


@dataclasses.dataclass
class Tally:
  """What the blocks of one set add up to."""

  full: int = 0  # bytes
  moved: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(1 << 16, np.int64)
  )  # elements by zig-zag distance; [0] did not change
  stored: dict[str, int] = dataclasses.field(
    default_factory=lambda: dict.fromkeys(CODECS, 0)
  )
  rates: dict[tuple[str, str], list[float]] = dataclasses.field(
    default_factory=dict
  )  # (what, codec) -> full bytes a second, one value a block

  @property
  def density(self) -> float:
    return float(1 - self.moved[0] / max(self.moved.sum(), 1))

  @property
  def bound(self) -> float:
    """The order-0 entropy [bytes]. By the chain rule: of z with 0 for unchanged."""
    share = self.moved[self.moved > 0] / self.moved.sum()
    return float(-(share * np.log2(share)).sum() * self.moved.sum() / 8)

  def rate(self, what: str, name: str) -> float:
    return statistics.median(self.rates[what, name])


def measure(block: np.ndarray, base: np.ndarray, tally: Tally, order: int) -> None:
  """Codes a block on its base with each codec, in turns, and adds to `tally`.

  block, base: uint8 [n]. RuntimeError if a codec gives other bytes back.
  """
  z = streams.distances(block.view(np.uint16), base.view(np.uint16))
  tally.moved += np.bincount(z, minlength=tally.moved.size)
  tally.full += block.size
  out = np.empty_like(base)
  encode: dict[str, Callable[[], bytes]] = {
    'xor': lambda: codec.encode_delta(block, base),
    'ulp': lambda: ulp.encode(block, base, _DTYPE)[0],
    'ulp_ctx': lambda: ulp.encode(block, base, _DTYPE, by_exponent=True)[0],
  }
  decode: dict[str, Callable[[bytes], None]] = {
    'xor': lambda frame: codec.decode_delta(frame, base, out),
    'ulp': lambda frame: ulp.decode(frame, base, out, _DTYPE),
    'ulp_ctx': lambda frame: ulp.decode(frame, base, out, _DTYPE),
  }
  first = order % len(CODECS)  # whoever is first finds colder caches
  for name in CODECS[first:] + CODECS[:first]:
    took, frame = _timed(encode[name])
    _add(tally, 'encode', name, block.size / took)
    tally.stored[name] += len(frame)
    if not frame:
      continue
    np.bitwise_not(block, out=out)  # what the codec before left would hide a fault
    took, _ = _timed(functools.partial(decode[name], frame))
    _add(tally, 'apply', name, block.size / took)
    checks, found = _timed(functools.partial(_hashes, frame, out))
    _add(tally, 'verified', name, block.size / (took + checks))
    if found[1] != codec.raw_hash(block):
      raise RuntimeError(f'{name}: decoding did not give the block back')


def _hashes(frame: bytes, out: np.ndarray) -> tuple[str, str]:
  return codec.stored_hash(frame), codec.raw_hash(out)


def _timed(call: Callable[[], _T]) -> tuple[float, _T]:
  began = time.thread_time()
  result = call()
  return time.thread_time() - began, result


def _add(tally: Tally, what: str, name: str, rate: float) -> None:
  tally.rates.setdefault((what, name), []).append(rate)


def run_synthetic(params: int) -> dict[float, Tally]:
  """Measures every learning rate on the same masters."""
  tallies = {lr: Tally() for lr in RATES}
  for i, (master, direction) in enumerate(delta_weights.synthetic(params, BLOCK)):
    base = codec.raw(master.astype(_BF16))
    for lr, tally in tallies.items():
      moved = (master + direction * np.float32(lr)).astype(_BF16)
      measure(codec.raw(moved), base, tally, i)
  return tallies


def measure_versions(versions: Iterator[delta_weights.Tensors]) -> list[Tally]:
  """Packs each version on the one before; without those that changed nothing."""
  tallies = []
  for old, new in itertools.pairwise(itertools.islice(versions, MOST_PAIRS + 1)):
    tally = Tally()
    rows, _, _ = _pack(old, None, (), 'ulp')
    for name, array in new.items():
      if array.dtype == _BF16:
        z = streams.distances(
          codec.raw(array).view(np.uint16), codec.raw(old[name]).view(np.uint16)
        )
        tally.moved += np.bincount(z, minlength=tally.moved.size)
    for name in CODECS:
      _, objects, _ = _pack(new, old, rows, name)
      tally.stored[name] = sum(map(len, objects))
    tally.full = sum(array.nbytes for array in new.values())
    if tally.density:
      tallies.append(tally)
  return tallies


def _pack(
  new: delta_weights.Tensors,
  old: delta_weights.Tensors | None,
  rows: Sequence[manifest.Tensor],
  name: str,
) -> tuple[tuple[manifest.Tensor, ...], list[bytes], float]:
  return pack.pack(
    new,
    old,
    rows,
    codec=name,
    block_bytes=_SETTINGS.block_bytes,
    object_bytes=_SETTINGS.object_bytes,
    threads=1,
  )


def summary(tally: Tally) -> dict[str, float]:
  """The figures of one synthetic set that are promised, and those beside them."""
  return {
    'ulp_vs_xor': tally.stored['ulp'] / tally.stored['xor'],
    'ulp_vs_bound': tally.stored['ulp'] / tally.bound,
    'encode_vs_xor': tally.rate('encode', 'ulp') / tally.rate('encode', 'xor'),
    'apply_gb_per_s_core': tally.rate('apply', 'ulp') / 1e9,
    'share_of_full': tally.stored['ulp'] / tally.full,
    'verified_gb_per_s_core': tally.rate('verified', 'ulp') / 1e9,
    'encode_gb_per_s_core': tally.rate('encode', 'ulp') / 1e9,
    'density': tally.density,
    'ulp_ctx_share_of_full': tally.stored['ulp_ctx'] / tally.full,
    'ulp_ctx_encode_gb_per_s_core': tally.rate('encode', 'ulp_ctx') / 1e9,
    'ulp_ctx_apply_gb_per_s_core': tally.rate('apply', 'ulp_ctx') / 1e9,
  }


def verdict(found: Mapping[str, float]) -> list[str]:
  """What is not as promised, one sentence each; empty if all is."""
  wrong = []
  for name, least, most in (
    ('ulp_vs_xor', 0, 0.55),
    ('ulp_vs_bound', 0, 1.15),
    ('encode_vs_xor', 1, np.inf),
    ('apply_gb_per_s_core', 1, np.inf),
    ('share_of_full', 0, 0.015),
  ):
    if not least <= found[name] <= most:
      wrong.append(f'{name}: got {found[name]:.4g}, want {least} to {most}')
  return wrong


def show_bytes(title: str, rows: Mapping[str, Tally]) -> None:
  """Prints what is stored, a row for each set."""
  sheet = _sheet(
    title,
    ['changed [%]', *(f'{name} [%]' for name in CODECS), 'bound [%]']
    + ['ulp/xor', 'ulp/bound'],
  )
  for label, tally in rows.items():
    xor, ours = tally.stored['xor'], tally.stored['ulp']
    sizes = [*(tally.stored[name] for name in CODECS), tally.bound]
    shares = [tally.density, *(size / tally.full for size in sizes)]
    ratios = [f'{ours / xor:.3f}', f'{ours / tally.bound:.3f}']
    sheet.add_row(label, *(f'{100 * share:.3g}' for share in shares), *ratios)
  console.Console(width=110).print(sheet)


def show_rates(title: str, rows: Mapping[str, Tally]) -> None:
  """Prints how fast, a row for each set."""
  kinds = [(what, name) for what in ('encode', 'apply', 'verified') for name in CODECS]
  sheet = _sheet(title, [f'{what}\n{name}' for what, name in kinds])
  for label, tally in rows.items():
    sheet.add_row(label, *(f'{tally.rate(*kind) / 1e6:.0f}' for kind in kinds))
  console.Console(width=110).print(sheet)


def _sheet(title: str, headings: Sequence[str]) -> table.Table:
  sheet = table.Table(title=title, box=box.SIMPLE, title_justify='left')
  sheet.add_column('', no_wrap=True)
  for heading in headings:
    sheet.add_column(heading.replace('[', r'\['), justify='right', no_wrap=True)
  return sheet


def _versions(run: str, steps: int) -> Iterator[delta_weights.Tensors]:
  if not run:
    return delta_weights.learned(config.Config(), steps)
  if '://' in run:
    return delta_weights.published(kv.open(run))
  folder = pathlib.Path(run).absolute() / 'store'
  if not folder.is_dir():
    raise ValueError(f'--run: got {run!r}, want a folder that holds store/, or a URL')
  return delta_weights.published(kv.open(f'file://{folder}'))


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name) to its exit code."""
  chosen = flags.FlagValues()
  flags.DEFINE_float(
    'params', 1e9, 'weights of the synthetic set', lower_bound=1, flag_values=chosen
  )
  flags.DEFINE_string('run', '', "a run's folder, or its store", flag_values=chosen)
  flags.DEFINE_integer(
    'steps', 6, 'steps taken without --run', lower_bound=0, flag_values=chosen
  )
  try:
    chosen(['delta', *argv])
    real = measure_versions(_versions(chosen.run, chosen.steps))
  except (flags.Error, ValueError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  if real:
    title = chosen.run or 'Muon steps on random tokens'
    show_bytes(
      f'{title}: shares of full bytes',
      {str(i + 1): tally for i, tally in enumerate(real)},
    )
  tallies = run_synthetic(int(chosen.params))
  named = {f'lr {lr:g}': tally for lr, tally in tallies.items()}
  show_bytes(f'{int(chosen.params):,} weights: shares of their bfloat16 bytes', named)
  show_rates('MB of bfloat16 bytes per second of one core', named)
  found = summary(tallies[JUDGED])
  wrong = verdict(found)
  for sentence in wrong:
    print(f'not as promised: {sentence}', file=sys.stderr)
  document: dict = {name: float(f'{value:.4g}') for name, value in found.items()}
  document['params'] = int(chosen.params)
  document['real'] = [
    {
      'density': round(tally.density, 4),
      'ulp_vs_xor': round(tally.stored['ulp'] / tally.stored['xor'], 4),
      'ulp_vs_bound': round(tally.stored['ulp'] / tally.bound, 4),
      'share_of_full': round(tally.stored['ulp'] / tally.full, 5),
    }
    for tally in real
  ]
  print(json.dumps(document), flush=True)
  return 1 if wrong else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
