"""How soon does a step reach a sampler far away, and what does the sampler lose by it?

  python -m experiments.bench.sync [--interval=30 --versions=6]
  python -m experiments.bench.sync --quick      a small model, for a test

A learner publishes SmolLM2-sized bfloat16 weights (135 million parameters, real shapes,
values drawn from N(0, .02), masters moved by a uniform update of up to 1e-6) through
fake-gcs-server; learner, sampler and cluster each reach it over a line of their own:
150 ms one way and 100 Mbit/s each way (`experiments.bench.link`). The sampler is a
process of its own (`sync_sampler`) that decodes all the while. Version 0 is full, then
a delta every `interval` seconds, the last version is a full copy again.

Then clusters of 1, 4 and 16 hosts (`sync_cluster`, k = `--fanout`) follow through
relay nodes, and further deltas are published; what counts is how often the store was
read for them, polls that found nothing left out.

Prints a line for each version and ends with a line of JSON:

  {"pause_share": .., "tokens_lost": .., "seconds_delta": .., "seconds_full": ..,
   "store_reads": {"1": .., "4": .., "16": ..}}

pause_share: the longest pause of the sampler, as a share of the interval. Seconds are
from the start of publishing to the version being served. Exit code 1 unless the pause
is below 2 % of the interval, no token is lost, and reads of the store are equal for all
cluster sizes. Hardware: 2 cores, 6 GiB; about 8 minutes.
"""

from collections.abc import Generator, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from absl import flags
import ml_dtypes
import numpy as np

from experiments.bench import link
from launch import emulator, process
from swe17 import config
from swe17.store import kv
from swe17.sync import publisher

_PATIENCE = 600.0  # seconds for a version to arrive; only a hang takes that long
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Size:
  """What is measured: the model, the line, how often, and how many."""

  layers: int = 30
  width: int = 576
  kv_width: int = 192
  ffn: int = 1536
  vocabulary: int = 49152
  latency: float = 0.15  # one way [s]
  rate: float = 12.5e6  # each way [bytes/s]
  interval: float = 30.0
  versions: int = 6
  followers: tuple[int, ...] = (1, 4, 16)
  relayed: int = 3  # versions published for each cluster
  fanout: int = 4
  lr: float = 1e-6

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The tensors: layers stacked, output tied to the embedding."""
    N, D, C, F = self.layers, self.width, self.kv_width, self.ffn
    layer = {'q': (D, D), 'k': (D, C), 'v': (D, C), 'o': (D, D), 'gate': (D, F)}
    layer |= {'up': (D, F), 'down': (F, D), 'norm_in': (D,), 'norm_out': (D,)}
    stacked = {f'layers/{name}': (N, *shape) for name, shape in layer.items()}
    return {'embed': (self.vocabulary, D), 'norm': (D,), **stacked}


QUICK = Size(
  layers=2, width=64, kv_width=32, ffn=128, vocabulary=1024, latency=0.02,
  interval=1.0, versions=3, followers=(1, 2, 4), relayed=1, fanout=2,
)  # fmt: skip


class Learner:
  """Masters in float32 that move a little each step, and what is published of them."""

  def __init__(self, size: Size, store: kv.Store):
    self._rng = np.random.default_rng(0)
    self._lr = size.lr
    self._masters = {
      name: self._rng.standard_normal(shape, np.float32) * np.float32(0.02)
      for name, shape in size.shapes.items()
    }
    cfg = config.Sync(
      full_every=1000, threads=os.cpu_count() or 1, object_bytes=32 << 20
    )
    self._publisher = publisher.Publisher(store, cfg, attempt='bench')
    self.version = -1

  def step(self) -> dict[str, np.ndarray]:
    """Moves the masters and returns the weights to publish, before the clock starts."""
    for master in self._masters.values():
      update = self._rng.random(master.shape, np.float32)
      master += (update * 2 - 1) * np.float32(self._lr)
    return {name: master.astype(_BF16) for name, master in self._masters.items()}

  def publish(
    self, tensors: Mapping[str, np.ndarray], *, full: bool = False
  ) -> publisher.Published:
    self.version += 1
    return self._publisher.publish(
      self.version, tensors, step=self.version, plan={}, full=full
    )


class Child:
  """A process of the bench, and the lines of JSON it says."""

  def __init__(self, module: str, argv: Sequence[str], env: Mapping[str, str]):
    self._name = module
    self._heard: list[dict[str, Any]] = []
    self._news = threading.Condition()
    self._process = subprocess.Popen(
      [sys.executable, '-m', f'experiments.bench.{module}', *argv],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=process.ROOT,
      env={**os.environ, **env},
    )
    threading.Thread(target=self._listen, daemon=True).start()

  def wait(self, kind: str, **like: Any) -> dict[str, Any]:
    """The first line of this kind with these values. RuntimeError if none comes."""
    want = {'kind': kind, **like}.items()

    def found() -> dict[str, Any] | None:
      return next((said for said in self._heard if want <= said.items()), None)

    with self._news:
      self._news.wait_for(
        lambda: found() is not None or self._process.poll() is not None, _PATIENCE
      )
      said = found()
    if said is None:
      raise RuntimeError(f'{self._name} did not say {dict(want)}: see above')
    return said

  def ask(self, mark: str) -> dict[str, Any]:
    """Asks a cluster for what it read so far."""
    assert self._process.stdin is not None
    self._process.stdin.write(f'{mark}\n')
    self._process.stdin.flush()
    return self.wait('reads', mark=mark)

  def end(self) -> None:
    """Closes its stdin, which ends it."""
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    try:
      self._process.wait(60)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _listen(self) -> None:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      try:
        said = json.loads(line)
      except ValueError:
        print(line, end='', file=sys.stderr)
        continue
      with self._news:
        self._heard.append(said)
        self._news.notify_all()
    self._process.wait()
    with self._news:
      self._news.notify_all()


@dataclasses.dataclass
class World:
  """The store, and a line to it for each who uses it."""

  url: str
  lines: dict[str, link.Link]

  def env(self, who: str) -> dict[str, str]:
    return emulator.gcs_env(self.lines[who].address)


@contextlib.contextmanager
def world(size: Size) -> Generator[World]:
  """Starts the emulator and the lines; ends them."""
  lines: dict[str, link.Link] = {}
  with contextlib.ExitStack() as stack:

    def line(port: int) -> link.Link:
      made = link.Link(('127.0.0.1', port), latency=size.latency, rate=size.rate)
      return stack.enter_context(made)

    def external(port: int) -> str:
      # Later parts of an upload go where the server says: over the same line.
      lines['learner'] = line(port)
      return lines['learner'].address

    server = stack.enter_context(emulator.gcs(external=external))
    port = int(server.address.rpartition(':')[2])
    lines['sampler'], lines['cluster'] = line(port), line(port)
    yield World(server.url('weights'), lines)


def measure_sampler(size: Size, around: World, learner: Learner) -> dict[str, Any]:
  """Versions through the store to a sampler that decodes."""
  sampler = Child('sync_sampler', [around.url], around.env('sampler'))
  seconds: list[float] = []
  tensors = learner.step()
  start = time.monotonic()
  for version in range(size.versions):
    time.sleep(max(0.0, start + version * size.interval - time.monotonic()))
    full = version in (0, size.versions - 1)
    began = time.time()
    done = learner.publish(tensors, full=full)
    published = time.time()
    if version + 1 < size.versions:
      tensors = learner.step()
    staged = sampler.wait('staged', version=version)
    served = sampler.wait('served', version=version)
    seconds.append(served['at'] - began)
    print(
      f'version {version} {"full" if full else "delta"}: {done.bytes / 1e6:.2f} MB '
      f'({done.changed_share:.2%} changed), published after {published - began:.1f} s, '
      f'staged {staged["at"] - began:.1f} s, served {seconds[-1]:.1f} s, '
      f'pause {served["pause"] * 1e3:.0f} ms',
      flush=True,
    )
    if version == 0:
      start = time.monotonic()  # the sampler has started: from here on by the clock
  sampler.end()
  end = sampler.wait('end')
  print(
    f'sampler: {end["tokens"]} tokens in {end["seconds"]:.0f} s, {end["lost"]} lost, '
    f'pauses {", ".join(f"{p * 1e3:.0f}" for p in end["pauses"])} ms, longest between '
    f'two tokens {end["longest"] * 1e3:.0f} ms, faults {end["faults"]}',
    flush=True,
  )
  return {
    'pause_share': max(end['pauses']) / size.interval,
    'tokens_lost': end['lost'],
    'seconds_delta': float(np.mean(seconds[1:-1])),
    'seconds_full': seconds[-1],
  }


def measure_cluster(
  size: Size, around: World, learner: Learner, followers: int
) -> dict[str, int]:
  """Reads of the store by a whole cluster while `size.relayed` versions reach it.

  Returns sums over controller, nodes and followers: reads of what was there, lists,
  bytes.
  """
  with tempfile.TemporaryDirectory() as folder:
    argv = [around.url, str(followers), str(size.fanout), folder]
    cluster = Child('sync_cluster', argv, around.env('cluster'))
    try:
      for follower in range(1, followers + 1):
        cluster.wait('followed', follower=follower, version=learner.version)
      before = cluster.ask('before')
      seconds = []
      for _ in range(size.relayed):
        tensors = learner.step()
        began = time.time()
        learner.publish(tensors)
        like = {'version': learner.version}
        at = [
          cluster.wait('followed', follower=follower, **like)['at']
          for follower in range(1, followers + 1)
        ]
        seconds.append(max(at) - began)
      after = cluster.ask('after')
    finally:
      cluster.end()
  sums = {
    name: sum(after[who][name] - before[who][name] for who in ('controller', 'others'))
    for name in ('reads', 'lists', 'bytes', 'absent')
  }
  others = sum(after['others'].values()) - sum(before['others'].values())
  print(
    f'{followers} followers, k = {size.fanout}: {size.relayed} versions, each at the '
    f'last follower after {np.mean(seconds):.1f} s; {sums["reads"]} reads of the store '
    f'({sums["bytes"] / 1e6:.2f} MB), {sums["absent"]} polls that found nothing, '
    f'{sums["lists"]} lists; {others} by others than the controller',
    flush=True,
  )
  return sums


def verdict(found: Mapping[str, Any]) -> list[str]:
  """What is not as promised, one sentence each; empty if all is."""
  wrong = []
  if not found['pause_share'] < 0.02:
    wrong.append(f'the pause is {found["pause_share"]:.2%} of the interval, want < 2 %')
  if found['tokens_lost']:
    wrong.append(f'{found["tokens_lost"]} tokens were lost')
  if len(set(found['store_reads'].values())) != 1:
    wrong.append(f'reads of the store are not flat: {found["store_reads"]}')
  return wrong


def run(size: Size) -> dict[str, Any]:
  """Everything, to the document of the last line."""
  with world(size) as around, emulator.within(around.env('learner')):
    learner = Learner(size, kv.open(around.url))
    count = sum(int(np.prod(shape)) for shape in size.shapes.values())
    print(f'{count / 1e6:.1f} million parameters', flush=True)
    found = measure_sampler(size, around, learner)
    reads = {
      str(n): measure_cluster(size, around, learner, n)['reads'] for n in size.followers
    }
  rounded = {
    name: float(f'{value:.4g}') if isinstance(value, float) else value
    for name, value in found.items()
  }
  return {**rounded, 'store_reads': reads}


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name) to its exit code."""
  chosen = flags.FlagValues()
  flags.DEFINE_float(
    'interval', None, 'seconds between versions', 0.1, flag_values=chosen
  )
  flags.DEFINE_integer(
    'versions', None, 'published for the sampler', 3, flag_values=chosen
  )
  flags.DEFINE_integer('fanout', None, 'children of a node', 1, flag_values=chosen)
  flags.DEFINE_bool('quick', False, 'a small model, seconds', flag_values=chosen)
  try:
    chosen(['sync', *argv])
  except flags.Error as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  size = QUICK if chosen.quick else Size()
  size = dataclasses.replace(
    size,
    interval=chosen.interval or size.interval,
    versions=chosen.versions or size.versions,
    fanout=chosen.fanout or size.fanout,
  )
  found = run(size)
  wrong = verdict(found)
  for sentence in wrong:
    print(f'not as promised: {sentence}', file=sys.stderr)
  print(json.dumps(found), flush=True)
  return 1 if wrong else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
