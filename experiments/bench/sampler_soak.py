"""A sampler under mixed load for long: flat memory, nothing compiled after the start.

  python -m experiments.bench.sampler_soak             an hour's worth, under a minute
  python -m experiments.bench.sampler_soak --minutes=2 for tests

One sampler process with a tiny model gets, a minute of an hour: 60 answers' worth of
agents behind the proxy (turns, streams, two answers, clients that leave, rewritten
histories), a group of 8 with one long prompt, clients of its own OpenAI routes, what
must be refused (no JSON, a body too large, values out of range, ids beyond the
vocabulary, a context too long), and a new version of the weights. All of it as fast as
it goes, with several minutes at a time.

Memory is the process's resident set, taken at every minute. After the first third it
must not grow: a line through the rest may rise by no more than 5 % in all.
`compilations` is the engine's own count since its start. The last line is JSON; exit
code 1 if memory grew or anything was compiled, or if an answer was not as it must be:

  {"minutes": 60, "answers": .., "compilations": 0, "grew_mb": .., "rss_mb": .., ...}
"""

import asyncio
from collections.abc import Sequence
import contextlib
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from absl import flags, logging
import aiohttp
import numpy as np

from experiments import program
from launch import process
from swe17 import config, types, wire

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_MINUTES = flags.DEFINE_integer('minutes', 60, 'of load', 2, flag_values=FLAGS)
_AT_ONCE = flags.DEFINE_integer('at_once', 4, 'minutes at a time', 1, flag_values=FLAGS)
_SEED = flags.DEFINE_integer('seed', 0, 'of everything', flag_values=FLAGS)

_AGENTS = 17  # episodes a minute: about 60 answers
_GROUP, _PROMPT = 8, 160  # members, tokens
_UP = 240.0  # seconds for the sampler to serve at first
_MAY_GROW = 0.05  # of resident memory, from the first third to the end


class Soak:
  """Everything that runs, and the counts."""

  def __init__(self, cfg: config.Config):
    # JAX must find its settings made.
    from experiments.bench import chaos_parts as parts
    from swe17.agent import formats
    from swe17.rollout import proxy, router
    from swe17.store import kv

    self.parts, self.cfg = parts, cfg
    self.fmt = formats.load()
    self.weights = parts.Weights(cfg, self.fmt.vocab_size, _SEED.value)
    self.samplers = parts.Samplers(cfg)
    self.route = router.Router(
      kv.open(cfg.store), seconds=cfg.rollout.request_seconds, patience=60.0
    )
    self.proxy = proxy.Proxy(cfg, self.fmt, self.route)
    self.publishing = asyncio.Lock()
    self.rss_mb: list[float] = []
    self.answers = self.refused = 0
    self.wrong: list[str] = []
    self.url = ''

  async def run(self) -> dict[str, float]:
    """Runs it to its end: the sampler's last counters."""
    self.weights.publish()
    self.samplers.start()
    async with contextlib.AsyncExitStack() as stack:
      stack.callback(self.samplers.close)
      await self.route.open()
      stack.push_async_callback(self.route.close)
      await self.proxy.open()
      stack.push_async_callback(self.proxy.close)
      await self._until_up()
      http = await stack.enter_async_context(
        aiohttp.ClientSession(
          connector=aiohttp.TCPConnector(limit=0),
          timeout=aiohttp.ClientTimeout(total=120.0),
        )
      )
      gate = asyncio.Semaphore(_AT_ONCE.value)
      supervise = asyncio.ensure_future(self.samplers.supervise())
      minutes = [
        asyncio.ensure_future(self._minute(http, gate, i))
        for i in range(_MINUTES.value)
      ]
      for one in asyncio.as_completed(minutes):
        await one
        if supervise.done():
          supervise.result()
      supervise.cancel()
      return await self.counters(http)

  async def counters(self, http: aiohttp.ClientSession) -> dict[str, float]:
    """What /metrics says, by name without prefix and suffix."""
    async with http.get(self.url + '/metrics') as response:
      text = await response.text()
    found = {}
    for line in text.splitlines():
      if line.startswith('swe17_sampler_') and '{' not in line:
        name, _, value = line.partition(' ')
        name = name.removeprefix('swe17_sampler_')
        # Prometheus adds it to the names of counters.
        name = name if name == 'pages_total' else name.removesuffix('_total')
        found[name] = float(value)
    return found

  async def _until_up(self) -> None:
    until = time.monotonic() + _UP
    while not await asyncio.to_thread(self.samplers.serves, 0):
      if time.monotonic() > until:
        raise TimeoutError(f'the sampler did not serve within {_UP:g} s')
      await asyncio.sleep(0.2)
    self.url = self.samplers.url(0)
    await self.route.discover()

  async def _minute(
    self, http: aiohttp.ClientSession, gate: asyncio.Semaphore, i: int
  ) -> None:
    """One minute's load, then memory and the next version."""
    async with gate:
      rng = random.Random(f'{_SEED.value}/{i}')
      agents = (self._episode(http, f'{i}-{n}') for n in range(_AGENTS))
      await asyncio.gather(
        *agents, self._group(i), self._chat(http, rng), self._hostile(http, rng)
      )
      async with self.publishing:  # versions leave no gap
        await asyncio.to_thread(self.weights.publish)
      self.rss_mb.append(self.samplers.memory()[0] / 1e6)
      n = len(self.rss_mb)
      print(f'minute {n}: {self.rss_mb[-1]:.1f} MB', file=sys.stderr)

  async def _episode(self, http: aiohttp.ClientSession, group_id: str) -> None:
    opened = self.proxy.open_episode(group_id, 0)
    agent = self.parts.Agent(http, opened.base_url, f'{_SEED.value}/{group_id}')
    try:
      await agent.run()
    except ConnectionError as e:
      self.wrong.append(f'episode {group_id}: {e}')
    served = self.proxy.close_episode(opened.key)
    self.answers += served.turns + served.replaced

  async def _group(self, i: int) -> None:
    """Members of a group: one long prompt, draws of their own."""
    rng = np.random.default_rng([_SEED.value, i])
    token_T = rng.integers(0, self.fmt.vocab_size, _PROMPT).astype(np.int32)
    asked = [
      types.GenerateRequest(
        f'group-{i}.{m}.0', token_T, 24, (), self.cfg.sampler.sampling, (i, m)
      )
      for m in range(_GROUP)
    ]
    results = await asyncio.gather(*map(self.route, asked))
    for request, result in zip(asked, results, strict=True):
      self.route.forget(request.session)
      self.answers += 1
      if result.token_T.size != 24 or result.kept.size_T.min() < 1:
        self.wrong.append(f'group {i}: {result.token_T.size} tokens of 24')

  async def _chat(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
    """A client of the sampler's own OpenAI routes, who waits when he is told to."""
    body = {
      'model': 'swe17',
      'messages': [{'role': 'user', 'content': f'test {rng.random()}'}],
      'max_tokens': 16,
      'n': rng.randint(1, 4),
      'stop': ['the'],
      'logprobs': True,
    }
    body['model'] = await self._model(http)
    while True:
      async with http.post(self.url + '/v1/chat/completions', json=body) as got:
        said = await got.json()
      if got.status != 429:
        break
      await asyncio.sleep(float(got.headers['Retry-After']))
    if got.status != 200 or len(said['choices']) != body['n']:
      self.wrong.append(f'chat: HTTP {got.status}: {str(said)[:200]}')
    self.answers += body['n']

  async def _model(self, http: aiohttp.ClientSession) -> str:
    async with http.get(self.url + '/v1/models') as got:
      return (await got.json())['data'][0]['id']

  async def _hostile(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
    """What must be refused, by a 4xx, whatever else is going on."""
    good = types.GenerateRequest(
      'x', np.arange(9, dtype=np.int32), 4, (), self.cfg.sampler.sampling, (1, 2)
    )
    meta, arrays = wire.decode(wire.request_to_bytes(good))
    beyond = {**arrays, 'token': np.full(9, 1 << 20, np.int32)}
    long = {**arrays, 'token': np.zeros(self.cfg.agent.max_context + 1, np.int32)}
    bodies: list[tuple[str, bytes]] = [
      ('/generate', b'no record'),
      ('/generate', rng.randbytes(300)),
      ('/generate', wire.encode({**meta, 'max_new': -1}, arrays)),
      ('/generate', wire.encode(meta, beyond)),
      ('/generate', wire.encode(meta, long)),
      ('/generate', bytes(9 << 20)),
      ('/v1/chat/completions', b'{"model": '),
      ('/v1/chat/completions', b'[' * 100_000),
      ('/v1/chat/completions', json.dumps({'model': 'x', 'messages': 7}).encode()),
    ]
    for path, body in bodies:
      try:
        async with http.post(self.url + path, data=body) as got:
          await got.read()
          if not 400 <= got.status < 500:
            self.wrong.append(f'{path} with {body[:20]!r}: HTTP {got.status}')
      except aiohttp.ClientError:
        pass  # hung up on before all of it was sent: refused too
      self.refused += 1


def grown(rss_mb: Sequence[float]) -> float:
  """MB by which a line through all but the first third rises."""
  rest = np.asarray(rss_mb[len(rss_mb) // 3 :], np.float64)
  if rest.size < 2:
    return 0.0
  slope = np.polyfit(np.arange(rest.size), rest, 1)[0]
  return float(slope * (rest.size - 1))


def report(soak: Soak, counters: dict[str, float], seconds: float) -> dict[str, Any]:
  """The record of a run; `broken` says what is not as it must be."""
  grew, broken = grown(soak.rss_mb), list(soak.wrong)
  if grew > _MAY_GROW * float(np.median(soak.rss_mb)):
    broken.append(f'memory grew by {grew:.1f} MB')
  if counters['compilations']:
    broken.append(f'{counters["compilations"]:g} compilations after the start')
  if counters['pages_used'] > counters['pages_total'] or counters['busy_slots']:
    broken.append(f'slots or pages are held by nobody: {counters}')
  return {
    'minutes': len(soak.rss_mb),
    'answers': soak.answers,
    'refused': soak.refused,
    'compilations': int(counters['compilations']),
    'grew_mb': round(grew, 2),
    'rss_mb': [round(soak.rss_mb[i], 1) for i in (0, len(soak.rss_mb) // 3, -1)],
    'versions': len(soak.weights.versions),
    'counters': counters,
    'seconds': round(seconds, 1),
    'broken': broken[:20],
  }


def main(_: Sequence[str]) -> int:
  logging.set_verbosity(logging.ERROR)
  with tempfile.TemporaryDirectory(prefix='soak-') as name:
    folder = pathlib.Path(name)
    process.prepare_jax(config.Config(run_dir=name), 'learner', 0)
    from experiments.bench import chaos_parts as parts

    soak = Soak(parts.settings_of(folder, 1, 32))
    began = time.monotonic()
    counters = asyncio.run(soak.run())
    found = report(soak, counters, time.monotonic() - began)
  print(json.dumps(found))
  return int(bool(found['broken']))


if __name__ == '__main__':
  program.run(main, FLAGS)
