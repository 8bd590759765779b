"""The main job over three emulated regions, one cut off and back: what that costs.

  python -m experiments.bench.regions                 (two runs, 7 to 10 minutes each)
  python -m experiments.bench.regions --quick         (small: does it work?)

One object store (fake-gcs-server), the learner beside it, and three regions that share
nothing but the store. Each has one sampler and one rollout process behind a line of its
own (`experiments/bench/link.py`):

  region   round trip   bandwidth each way
  0        20 ms        1000 Mbit/s
  1        150 ms       100 Mbit/s           cut off for a minute in the middle
  2        250 ms       50 Mbit/s

Then the same settings in a single region beside the store: as many samplers and slots,
one rollout process, no lines. Both take the same number of groups. All of it runs on
this machine's cores, so the regions compete for them; what is emulated is the network.

`groups_lost` and `stalled` are defined in `regions_report.py`. Bytes are counted by the
lines, HTTP and all, polling included: down is from the store to a region. The last line
is JSON; `<dir>/regions.png` has the curves.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import threading
import time
from typing import Any
import urllib.parse

from absl import flags

from experiments import options, program
from experiments.bench import link, regions_report
from launch import emulator, folder, local, process
from swe17 import config, settings
from swe17.metrics import records
from swe17.store import kv

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_DIR = flags.DEFINE_string(
  'dir', '', 'folder; empty: runs/regions-<time>', flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer(
  'steps', 24, 'optimiser steps of each run', flag_values=FLAGS
)
_SEED = flags.DEFINE_integer('seed', 0, 'seeds both runs', flag_values=FLAGS)
_CUT_SECONDS = flags.DEFINE_float(
  'cut_seconds', 60.0, 'how long a region is cut off', flag_values=FLAGS
)
_CUT_STEP = flags.DEFINE_integer(
  'cut_step', 0, 'when; 0: a third of the steps', flag_values=FLAGS
)
_QUICK = flags.DEFINE_bool(
  'quick', False, 'a short warm start and small batches', flag_values=FLAGS
)
_ONLY_REGIONS = flags.DEFINE_bool(
  'only_regions', False, 'leave out the single region', flag_values=FLAGS
)

# (seconds of a round trip, bytes a second each way)
LINES = ((0.020, 1000e6 / 8), (0.150, 100e6 / 8), (0.250, 50e6 / 8))
CUT_REGION = 1
_QUICK_SETTINGS = {  # enough practice to solve something now and then
  'batch.groups': 6,
  'imitation.episodes': 600,
  'imitation.steps': 120,
  'rollout.eval_samples': 1,
  'tasks.heldout': 12,
  'tasks.train': 60,
}


def flags_of(regions: int) -> list[str]:
  """Settings of a run over so many regions; both kinds put as much on the cores."""
  R = len(LINES)
  values: dict[str, Any] = {
    'steps': _STEPS.value,
    'seed': _SEED.value,
    'regions': regions,
    'sampler.processes': R,
    'sampler.slots': 24,  # three groups of eight a sampler
    'rollout.processes': regions,
    'sandbox.workers': R // regions,  # of one rollout process
    **(_QUICK_SETTINGS if _QUICK.value else {}),
  }
  return [f'--config.{name}={value}' for name, value in values.items()]


def prepare(run_dir: pathlib.Path, store: str, regions: int) -> config.Config:
  """A claimed and filled run folder, as `experiments.swe17` makes it."""
  quickstart = process.ROOT / 'experiments' / 'configs' / 'quickstart.py'
  argv = [f'--config={quickstart}', f'--run_dir={run_dir}', f'--config.store={store}']
  chosen = options.parse([*argv, *flags_of(regions)])
  # Held until this process ends: nobody else may work in the folder meanwhile.
  folder.claim(chosen.cfg.run_dir, resume=False)
  command = ['python', '-m', 'experiments.bench.regions']
  folder.fill(chosen.cfg.run_dir, settings.to_json(chosen.cfg, chosen.origin), command)
  return chosen.cfg


class Cutter(threading.Thread):
  """Cuts a line once the learner has come to a step, and heals it after a while."""

  def __init__(self, line: link.Link, run_dir: str, step: int, seconds: float):
    super().__init__(name='cutter', daemon=True)
    self._line, self._run_dir = line, run_dir
    self._step, self._seconds = step, seconds
    self._over = threading.Event()
    self.began = self.ended = 0.0

  def run(self) -> None:
    while last_step(self._run_dir) < self._step:
      if self._over.wait(0.2):
        return
    self.began = time.time()
    self._line.cut()
    print(f'region {CUT_REGION} is cut off for {self._seconds:g} s', flush=True)
    self._over.wait(self._seconds)
    self._line.heal()
    self.ended = time.time()
    print(f'region {CUT_REGION} is back', flush=True)

  def stop(self) -> None:
    self._over.set()
    self.join()


def last_step(run_dir: str) -> int:
  rows = records.read(run_dir)
  return rows[-1]['step'] if rows else 0


def run_regions(
  cfg: config.Config, server: emulator.Server
) -> tuple[dict[str, list[int]], regions_report.Cut]:
  """Runs `cfg` with each region behind its line. Bytes by direction, and the cut.

  RuntimeError if the run failed, or was over before the region was back.
  """
  place = urllib.parse.urlsplit(server.address)
  assert place.hostname is not None and place.port is not None
  target = (place.hostname, place.port)
  lines = [link.Link(target, latency=rtt / 2, rate=rate) for rtt, rate in LINES]

  def env_of(role: str, index: int) -> dict[str, str]:
    if role not in ('sampler', 'rollout'):
      return server.env  # the learner is where the store is
    return emulator.gcs_env(lines[index % len(lines)].address)

  step = _CUT_STEP.value or max(1, cfg.steps // 3)
  cutter = Cutter(lines[CUT_REGION], cfg.run_dir, step, _CUT_SECONDS.value)
  cutter.start()
  try:
    code = local.run(cfg, resume=False, env_of=env_of)
  finally:
    cutter.stop()
    for line in lines:
      line.close()
  if code:
    raise RuntimeError(f'the run ended with exit code {code}: see {cfg.run_dir}/logs')
  done = finished_at(cfg)
  if not cutter.began or done < cutter.began + _CUT_SECONDS.value:
    raise RuntimeError('training was over before the region was back: more --steps')
  sizes = {
    'down': [line.down.bytes for line in lines],
    'up': [line.up.bytes for line in lines],
  }
  return sizes, regions_report.Cut(CUT_REGION, cutter.began, cutter.ended)


def finished_at(cfg: config.Config) -> float:
  """When the last version was published, in seconds since 1970."""
  found = records.read_events(os.path.join(cfg.run_dir, 'events.jsonl'))
  return max(e['time'] for e in found if e['kind'] == 'version')


def steps_of(cfg: config.Config, cut: regions_report.Cut) -> tuple[float, float]:
  """The steps that the learner had done when the cut began and when it ended."""
  found = records.read_events(os.path.join(cfg.run_dir, 'events.jsonl'))
  versions = [(e['time'], e['step']) for e in found if e['kind'] == 'version']
  began, ended = (
    max((step for at, step in versions if at <= when), default=0)
    for when in (cut.began, cut.ended)
  )
  return began, ended


def judge(
  cfg: config.Config,
  store: kv.Store,
  sizes: dict[str, list[int]],
  cut: regions_report.Cut,
) -> dict[str, Any]:
  """The numbers of the run over regions."""
  run_dir = pathlib.Path(cfg.run_dir)
  rows = records.read(cfg.run_dir)
  seen = regions_report.groups(run_dir, store)
  late = regions_report.learner_stalls(rows)
  idle = regions_report.region_stalls(seen.stored, cfg.regions, cut)
  for step, seconds in late:
    print(f'step {step} came after {seconds:.1f} s')
  for text in idle:
    print(text)
  return {
    'groups_lost': seen.lost,
    'stalled': len(late) + len(idle),
    'bytes_down': sum(sizes['down']),
    'bytes_up': sum(sizes['up']),
    'down_by_region': sizes['down'],
    'up_by_region': sizes['up'],
    'groups': {
      'started': len(seen.started),
      'finished': len(seen.finished),
      'trained': seen.trained,
      'no_signal': seen.no_signal,
      'dropped': seen.dropped,
      'waiting': len(seen.waiting),
    },
    'stored_by_rollout': {i: len(times) for i, times in sorted(seen.stored.items())},
  }


def show(result: dict[str, Any]) -> None:
  """Prints the numbers for a person."""
  for region, (rtt, rate) in enumerate(LINES):
    down, up = result['down_by_region'][region], result['up_by_region'][region]
    print(
      f'region {region} ({1e3 * rtt:.0f} ms, {8e-6 * rate:.0f} Mbit/s): '
      f'{down / 1e6:.1f} MB down, {up / 1e6:.1f} MB up'
    )
  print('groups: ' + ', '.join(f'{n} {name}' for name, n in result['groups'].items()))
  for name, run in result['runs'].items():
    print(
      f'{name}: solve rate of the last third {100 * run["solve_last_third"]:.1f} %, '
      f'staleness {run["staleness_mean"]:.2f} (max {run["staleness_max"]:g}) steps, '
      f'{run["seconds"] / 60:.1f} minutes of training'
    )


def main(argv: Sequence[str]) -> None:
  del argv
  where = pathlib.Path(_DIR.value or f'runs/regions-{time.strftime("%Y%m%d-%H%M%S")}')
  with emulator.gcs() as server, emulator.within(server.env):
    bucket = server.url('swe17-regions')
    spread = prepare(where / 'regions', f'{bucket}/regions', len(LINES))
    sizes, cut = run_regions(spread, server)
    result = judge(spread, kv.open(spread.store), sizes, cut)
    runs = {'three regions': spread}
    if not _ONLY_REGIONS.value:
      single = prepare(where / 'single', f'{bucket}/single', 1)
      if code := local.run(single, resume=False, env_of=lambda *_: server.env):
        raise RuntimeError(f'the single region ended with exit code {code}')
      runs['one region'] = single
  rows = {name: records.read(cfg.run_dir) for name, cfg in runs.items()}
  result['cut'] = {**dataclasses.asdict(cut), 'steps': steps_of(spread, cut)}
  result['runs'] = {
    name: regions_report.curve(rows[name])
    | {'heldout': regions_report.heldout(pathlib.Path(cfg.run_dir))}
    for name, cfg in runs.items()
  }
  (where / 'regions.png').write_bytes(regions_report.draw(rows, result['cut']['steps']))
  (where / 'regions.json').write_text(json.dumps(result, indent=1))
  show(result)
  print(json.dumps(result), flush=True)


if __name__ == '__main__':
  program.run(main, FLAGS)
