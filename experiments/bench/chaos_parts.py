"""What the chaos bench is made of: samplers that die, weights that move, agents.

See `chaos_sampler`, which starts all of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import aiohttp
import jax
import ml_dtypes
import numpy as np

from swe17 import config, settings, types
from swe17 import kept as kept_sets
from swe17.model import params as p
from swe17.rollout import recorded, router
from swe17.store import kv
from swe17.sync import apply, publisher

_MOVES = 0.03  # of a weight's deviation, a version
_SHARP = 2.5  # makes kept sets of all sizes
_WORDS = ('view', 'edit', 'return', 'None', 'x + 1', 'the test fails', 'for i in a:')


def settings_of(folder: pathlib.Path, samplers: int, agents: int) -> config.Config:
  """A run that a tiny model serves."""
  slots = max(4, -(-agents // samplers))
  return config.Config(
    run_dir=str(folder),
    store=f'file://{folder}/store',
    model=config.Model(
      layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, rotary_dim=8
    ),
    agent=config.Agent(
      max_turns=40, max_new_tokens=24, max_context=224, episode_seconds=600.0
    ),
    sampler=config.Sampler(processes=samplers, slots=slots, queue=2 * agents),
    rollout=config.Rollout(request_seconds=30.0, turn_seconds=240.0),
    sync=config.Sync(verify_device='checksum'),
  )


class Weights:
  """Versions of weights: published one after another, and kept to compare with."""

  def __init__(self, cfg: config.Config, vocab: int, seed: int):
    self.abstract = p.abstract(cfg.model, vocab)
    self._rng = np.random.default_rng(seed)
    self._masters = {
      name: self._drawn(leaf) for name, leaf in apply.name_tree(self.abstract).items()
    }
    self._publisher = publisher.Publisher(kv.open(cfg.store), cfg.sync, attempt='chaos')
    self.versions: list[dict[str, np.ndarray]] = []

  def publish(self) -> None:
    """Moves every weight a little and publishes the next version."""
    for name, master in self._masters.items():
      step = self._rng.normal(size=master.shape).astype(np.float32)
      self._masters[name] = master + _MOVES * float(master.std()) * step
    tensors = {n: m.astype(ml_dtypes.bfloat16) for n, m in self._masters.items()}
    version = len(self.versions)
    plan = {'step': version, 'consumed_below': 0, 'consumed_rest': [], 'done': False}
    self.versions.append(tensors)
    self._publisher.publish(version, tensors, step=version, plan=plan)

  def _drawn(self, leaf: p.Leaf) -> np.ndarray:
    """Initial values; drawn here, where there is nothing to compile."""
    drawn = self._rng.normal(leaf.mean, leaf.scale, leaf.shape).astype(np.float32)
    return drawn * (_SHARP if leaf.axes[0] == 'vocab' else 1.0)

  def params(self, version: int) -> p.Params:
    """A version's values, as a learner computes with them."""
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32'), self.abstract
    )
    return apply.from_host(self.versions[version], shapes)


class Samplers:
  """Sampler processes and who starts them again."""

  def __init__(self, cfg: config.Config):
    self._cfg, self._folder = cfg, pathlib.Path(cfg.run_dir)
    document = settings.to_json(cfg, dict.fromkeys(settings.leaves(), 'flag'))
    (self._folder / 'config.json').write_text(json.dumps(document))
    self._running: list[subprocess.Popen] = []
    self._store = kv.open(cfg.store)
    self._killed: dict[int, tuple[float, int]] = {}  # index -> (when, process)
    self.down: list[float] = []  # seconds from a kill until it served again
    self.kills = 0

  def start(self) -> None:
    self._running = [self._spawn(i) for i in range(self._cfg.sampler.processes)]

  def kill(self, indices: Sequence[int]) -> None:
    """kill -9, without a word."""
    for i in indices:
      if self._running[i].poll() is None and i not in self._killed:
        os.kill(self._running[i].pid, signal.SIGKILL)
        self._killed[i] = time.monotonic(), self._running[i].pid
        self.kills += 1

  async def supervise(self) -> None:
    """Starts again what died; notes when it serves."""
    while True:
      for i, running in enumerate(self._running):
        if running.poll() is not None:
          if i not in self._killed:
            said = self._log(i).read_text()[-2000:]
            raise RuntimeError(f'sampler {i} ended by itself:\n{said}')
          self._running[i] = self._spawn(i)
        elif await asyncio.to_thread(self._back, i):
          self.down.append(time.monotonic() - self._killed.pop(i)[0])
      await asyncio.sleep(0.1)

  def serves(self, i: int) -> bool:
    """Whether this process of the sampler has said that it serves."""
    return bool(self.url(i))

  def url(self, i: int) -> str:
    """Where this process of the sampler serves; '' if it has not said so."""
    data = self._store.read(f'samplers/{i}.json')
    if data is None:
      return ''
    entry = json.loads(data)
    return entry['url'] if entry['pid'] == self._running[i].pid else ''

  def _back(self, i: int) -> bool:
    """Whether one that was killed serves again, as another process."""
    killed = self._killed.get(i)
    return killed is not None and killed[1] != self._running[i].pid and self.serves(i)

  def memory(self) -> list[int]:
    """Resident bytes of each."""
    page = os.sysconf('SC_PAGE_SIZE')
    found = []
    for running in self._running:
      text = pathlib.Path(f'/proc/{running.pid}/statm').read_text()
      found.append(int(text.split()[1]) * page)
    return found

  def close(self) -> None:
    for running in self._running:
      if running.poll() is None:
        running.terminate()
    for running in self._running:
      try:
        running.wait(timeout=10)
      except subprocess.TimeoutExpired:
        running.kill()
        running.wait()

  def _log(self, i: int) -> pathlib.Path:
    return self._folder / f'sampler-{i}.log'

  def _spawn(self, i: int) -> subprocess.Popen:
    argv = [sys.executable, '-m', 'experiments.swe17', '--role=sampler', f'--index={i}']
    argv += [f'--run_dir={self._folder}', f'--parent={os.getpid()}']
    with self._log(i).open('ab') as log:
      return subprocess.Popen(
        argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
      )


@dataclasses.dataclass(frozen=True)
class Answer:
  """One request as the router was asked it, and all that came back."""

  request: types.GenerateRequest
  result: types.GenerateResult

  @property
  def episode(self) -> str:
    return self.request.session.rpartition('.')[0]

  @property
  def turn(self) -> bytes:
    """Names context and drawn tokens together."""
    ids = np.concatenate([self.request.token_T, self.result.token_T])
    return ids.astype('<i4').tobytes()


class Watched(router.Router):
  """A router that keeps an account of its own of whatever passes through it."""

  answers: list[Answer]
  by_episode: dict[str, list[Answer]]

  async def open(self) -> None:
    self.answers, self.by_episode = [], {}
    await super().open()

  async def stream(
    self, request: types.GenerateRequest
  ) -> AsyncGenerator[types.GenerateResult, None]:
    parts = []
    async with contextlib.aclosing(super().stream(request)) as drawn:
      async for part in drawn:
        parts.append(part)
        if part.finish:
          answer = Answer(request, types.join(parts))
          self.answers.append(answer)
          self.by_episode.setdefault(answer.episode, []).append(answer)
        yield part


class Agent:
  """Talks to the proxy as any harness would, at random.

  Attributes:
    said: answers that it got.
    left: answers that it may have been given without hearing of them.
    waited: seconds between tries.
  """

  def __init__(self, http: aiohttp.ClientSession, base_url: str, seed: str):
    self._http, self._url, self._rng = http, base_url, random.Random(seed)
    self.said, self.left, self.waited = 0, 0, 0.0

  async def run(self) -> None:
    """One episode. ConnectionError once nobody answered for too long."""
    rng = self._rng
    history: list[dict[str, Any]] = [_user(rng)]
    for _ in range(rng.randint(2, 5)):
      if rng.random() < 0.05:
        await self._leave(history)
      told = await self._ask(history)
      if told is None:
        return  # its context is full
      if rng.random() < 0.1 and len(history) > 2:
        history = [history[0], _user(rng)]  # a summary, of sorts
      else:
        history = [*history, rng.choice(told), _user(rng)]

  async def _ask(self, history: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    n = 2 if self._rng.random() < 0.1 else 1
    body = {
      'model': 'swe17',
      'messages': history,
      'n': n,
      'max_tokens': self._rng.randint(6, 24),
      'stream': n == 1 and self._rng.random() < 0.3,
    }
    until, pause = time.monotonic() + 120.0, 0.2
    while True:
      try:
        async with self._http.post(f'{self._url}/chat/completions', json=body) as got:
          data = await got.read()
          if got.status == 400 and b'context_length_exceeded' in data:
            return None
          if got.status == 200:
            told = _streamed(data) if body['stream'] else _whole(data)
            if told is not None:
              self.said += n
              return told
            self.left += n
          elif got.status == 503:
            self.left += n  # one of several may have been there before it failed
          elif got.status != 429:
            raise RuntimeError(f'HTTP {got.status}: {data[:300]!r}')
      except aiohttp.ClientError:
        self.left += n
      if time.monotonic() > until:
        raise ConnectionError('nobody answered for 120 s')
      await asyncio.sleep(pause)
      self.waited += pause
      pause = min(2 * pause, 3.0)

  async def _leave(self, history: list[dict[str, Any]]) -> None:
    """Asks, and goes away before the answer is there (or just when it is)."""
    body = {'model': 'swe17', 'messages': history, 'stream': True}
    try:
      async with asyncio.timeout(0.3 * self._rng.random()):
        async with self._http.post(f'{self._url}/chat/completions', json=body) as got:
          await got.read()
    except (TimeoutError, aiohttp.ClientError):
      pass
    self.left += 1


def _user(rng: random.Random) -> dict[str, Any]:
  words = rng.choices(_WORDS, k=rng.randint(1, 5))
  return {'role': 'user', 'content': ' '.join(words)}


def _whole(data: bytes) -> list[dict[str, Any]]:
  return [choice['message'] for choice in json.loads(data)['choices']]


def _streamed(data: bytes) -> list[dict[str, Any]] | None:
  """The message that the chunks make; None if the stream ended in an error."""
  message: dict[str, Any] = {'role': 'assistant', 'content': ''}
  calls: dict[int, dict[str, Any]] = {}
  lines = [line[6:] for line in data.split(b'\n') if line.startswith(b'data: ')]
  if not lines or lines[-1].strip() != b'[DONE]':
    return None
  for line in lines[:-1]:
    chunk = json.loads(line)
    if 'error' in chunk:
      return None
    for choice in chunk['choices']:
      delta = choice['delta']
      message['content'] += delta.get('content') or ''
      for call in delta.get('tool_calls') or ():
        own = calls.setdefault(call['index'], {'id': '', 'name': '', 'arguments': ''})
        own['id'] += call.get('id') or ''
        for key in ('name', 'arguments'):
          own[key] += (call.get('function') or {}).get(key) or ''
  if calls:
    message['tool_calls'] = [
      {
        'id': own['id'],
        'type': 'function',
        'function': {'name': own['name'], 'arguments': own['arguments']},
      }
      for _, own in sorted(calls.items())
    ]
  return [message]


def corrupt(served: recorded.Served, agent: Agent, answers: Sequence[Answer]) -> str:
  """What is wrong with an episode by the accounts of its agent and the router; ''.

  Every trained turn must be one that the router got, with the very context it was asked
  with, and be there once; there must be one for each answer that the agent got.
  """
  known: dict[bytes, list[Answer]] = {}
  for answer in answers:
    known.setdefault(answer.turn, []).append(answer)
  for segment in served.segments:
    for turn in np.unique(segment.turn_T[segment.mask_T]):
      at_T = np.flatnonzero(segment.mask_T & (segment.turn_T == turn))
      name = segment.token_T[: at_T[-1] + 1].astype('<i4').tobytes()
      found = [one for one in known.get(name, []) if _same(segment, at_T, one.result)]
      if not found:
        return f'turn {turn}: trained twice, or other than it was drawn'
      known[name].remove(found[0])
  got = served.turns + served.replaced
  if not agent.said <= got <= agent.said + agent.left:
    return f'{got} answers recorded, {agent.said} told, {agent.left} perhaps'
  return ''


def _same(
  segment: types.Segment, at_T: np.ndarray, drawn: types.GenerateResult
) -> bool:
  """Whether a turn of a segment carries what its tokens were drawn with."""
  if at_T.size != drawn.token_T.size:
    return False
  lo, hi = int(at_T[0]), int(at_T[-1]) + 1
  sets = kept_sets.cut(segment.kept, lo, hi)
  return (
    np.array_equal(segment.mu_logp_T[at_T], drawn.logp_T)
    and np.array_equal(segment.version_T[at_T], drawn.version_T)
    and np.array_equal(segment.entropy_T[at_T], drawn.entropy_T)
    and np.array_equal(sets.offset_T1, drawn.kept.offset_T1)
    and np.array_equal(sets.ids, drawn.kept.ids)
  )
