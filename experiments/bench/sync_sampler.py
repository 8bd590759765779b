"""The sampler of the sync bench: follows the weights while a toy decode loop runs.

Started by `experiments.bench.sync` as a process of its own, with the way to the store
in its environment. Real are the store, `sync.follower` on a thread, and `sync.apply`,
which brings the device up to date between two decode steps. The decoding is a toy: each
step looks rows of the embedding up, runs them through one layer and draws a token for
every slot, `_PACE` seconds apart, as if a device were busy meanwhile. Every token keeps
the version that made it. Says what happens on stdout, in lines of JSON; ends when its
stdin does.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from swe17.store import kv
from swe17.sync import apply, follower

_SLOTS, _LENGTH = 8, 64  # requests at once, tokens of a request
_PACE = 0.02  # seconds a decode step
_POLL = 0.2  # seconds between looks for the next manifest
_saying = threading.Lock()

Params = dict[str, jax.Array]


def say(kind: str, **values: object) -> None:
  """One line of JSON, in one piece whichever thread says it."""
  with _saying:
    print(json.dumps({'kind': kind, 'at': time.time(), **values}), flush=True)


@functools.partial(jax.jit, static_argnames='layer')
def step(params: Params, token_B: jax.Array, layer: int = 0) -> jax.Array:
  """One decode step: the next token of each slot, int32 [B]."""
  x_BD = params['embed'][token_B]
  gate_BF = jax.nn.silu(x_BD @ params['layers/gate'][layer])
  x_BD = (
    x_BD
    + (gate_BF * (x_BD @ params['layers/up'][layer])) @ (params['layers/down'][layer])
  )
  return jnp.argmax(x_BD @ params['embed'][:512].T, axis=-1).astype(jnp.int32)


@dataclasses.dataclass
class Request:
  """One request: the version of each token so far."""

  versions: list[int] = dataclasses.field(default_factory=list)

  @property
  def sound(self) -> bool:
    """All tokens are there, each with its version, and versions only went up."""
    return len(self.versions) == _LENGTH and sorted(self.versions) == self.versions


class Weights:
  """A follower on a thread, and what it has staged."""

  def __init__(self, store: kv.Store):
    self.follower = follower.Follower(store)
    self.staged: follower.Staged | None = None
    self.error: BaseException | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._follow, daemon=True)

  def first(self) -> follower.Staged:
    while (staged := self.follower.poll()) is None:
      time.sleep(_POLL)
    return staged

  def start(self) -> None:
    self._thread.start()

  def close(self) -> None:
    self._stop.set()
    self._thread.join()

  def _follow(self) -> None:
    try:
      while not self._stop.wait(_POLL):
        if self.staged is None and (staged := self.follower.poll()) is not None:
          say('staged', version=staged.version, bytes=staged.bytes)
          self.staged = staged
    except BaseException as e:
      self.error = e
      raise


def decode(weights: Weights, params: Params, ended: threading.Event) -> None:
  """Decodes until `ended`; swaps between two steps. Says the sums at the end."""
  version = weights.follower.version
  requests = [Request() for _ in range(_SLOTS)]
  token_B = jnp.zeros(_SLOTS, jnp.int32)
  tokens = lost = 0
  pauses: list[float] = []
  began = last = time.monotonic()
  longest = 0.0  # between two tokens of one slot
  while not ended.is_set():
    if weights.error is not None:
      raise RuntimeError('nobody follows the weights any more') from weights.error
    staged = weights.staged
    if staged is not None:
      start = time.monotonic()
      params = apply.apply(params, staged)
      weights.follower.commit(staged)
      pauses.append(time.monotonic() - start)
      version, weights.staged = staged.version, None
      say('served', version=version, pause=pauses[-1])
    token_B = step(params, token_B)
    made = np.asarray(token_B)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    for slot, request in enumerate(requests):
      if version is None or not 0 <= made[slot] < 512:
        lost += 1
        continue
      request.versions.append(version)
      tokens += 1
      if len(request.versions) == _LENGTH:
        lost += 0 if request.sound else _LENGTH
        requests[slot] = Request()
    time.sleep(max(0.0, _PACE - (time.monotonic() - last)))
  seconds = time.monotonic() - began
  faults = dict(weights.follower.faults)
  sums = {'tokens': tokens, 'lost': lost, 'seconds': seconds, 'longest': longest}
  say('end', **sums, pauses=pauses, faults=faults)


def main(argv: Sequence[str]) -> int:
  """Runs the sampler on the store at URL `argv[0]`."""
  (url,) = argv
  jax.config.update('jax_default_matmul_precision', 'highest')
  ended = threading.Event()

  def wait() -> None:
    sys.stdin.read()
    ended.set()

  threading.Thread(target=wait, daemon=True).start()
  weights = Weights(kv.open(url))
  staged = weights.first()
  say('staged', version=staged.version, bytes=staged.bytes)
  abstract = {
    name: jax.ShapeDtypeStruct(array.shape, jnp.float32)
    for name, array in staged.tensors.items()
  }
  # Put there by name, as a swap leaves them: for arrays that merely happen to be on
  # their device JAX compiles a second program, in the middle of the first swap.
  params = jax.device_put(apply.from_host(staged.tensors, abstract), jax.devices()[0])
  params = apply.warm(params, staged)
  step(params, jnp.zeros(_SLOTS, jnp.int32)).block_until_ready()
  weights.follower.commit(staged)
  say('served', version=staged.version, pause=0.0)
  weights.start()
  try:
    decode(weights, params, ended)
  finally:
    weights.close()
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
