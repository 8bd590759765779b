"""Agents that notice nothing while samplers are killed and weights are swapped.

  python -m experiments.bench.chaos_sampler            200 agents, about 4 minutes
  python -m experiments.bench.chaos_sampler --quick    10 agents, for tests

Sampler processes serve a tiny model (random weights, sharpened) to agents that talk to
the recording proxy in this process, each at its own URL: turn by turn, some streamed,
some for two answers, some going away early, some with their history rewritten. A new
version of the weights, which moves every one of them, is published every few seconds.
Every `--every` seconds a sampler picked at random gets kill -9, one time all of them,
and is started again.

An episode is *lost* if it has no outcome through no fault of its own. It is *corrupted*
if its segments are not, token by token and with the contexts, what the router got
for it (an account of its own), or if the answers counted are not those that the
agent got; a sample of answers is scored with the weights that they claim, and drawn
again (`chaos_check` says how). `seconds_lost_a_kill` is the mean time until the killed
sampler served again, `seconds_to_go_on` the mean time between a failure and the next
token of a request that it hit, elsewhere. The last line is JSON; exit code 1 if any
episode is lost or corrupted:

  {"episodes": .., "kills": .., "lost": 0, "corrupted": 0, ...}
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

from experiments import program
from launch import process
from swe17 import config, types

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_AGENTS = flags.DEFINE_integer('agents', 200, 'at once', 1, flag_values=FLAGS)
_SAMPLERS = flags.DEFINE_integer('samplers', 4, 'processes', 2, flag_values=FLAGS)
_KILLS = flags.DEFINE_integer('kills', 10, 'times of killing', 1, flag_values=FLAGS)
_EVERY = flags.DEFINE_float('every', 15.0, 'seconds between two', flag_values=FLAGS)
_PUBLISH = flags.DEFINE_float(
  'publish', 5.0, 'seconds between two versions', flag_values=FLAGS
)
_CHECKED = flags.DEFINE_integer(
  'checked', 200, 'answers that are scored anew', 1, flag_values=FLAGS
)
_SEED = flags.DEFINE_integer('seed', 0, 'of everything', flag_values=FLAGS)
_QUICK = flags.DEFINE_bool('quick', False, 'small, for tests', flag_values=FLAGS)

_UP = 240.0  # seconds for the samplers to serve at first
_END = 300.0  # seconds for the last episodes
_TASK = types.Task('chaos/0', 'chaos', 'train', 'chaos', '', {})


def sizes() -> dict[str, Any]:
  """What the flags ask for."""
  if _QUICK.value:
    return {
      'agents': 10, 'samplers': 2, 'kills': 2, 'every': 3.0, 'publish': 1.5,
      'checked': 24,
    }  # fmt: skip
  return {
    'agents': _AGENTS.value, 'samplers': _SAMPLERS.value, 'kills': _KILLS.value,
    'every': _EVERY.value, 'publish': _PUBLISH.value, 'checked': _CHECKED.value,
  }  # fmt: skip


class Chaos:
  """Everything that runs, and the counts."""

  def __init__(self, cfg: config.Config, asked: dict[str, Any]):
    # JAX must find its settings made.
    from experiments.bench import chaos_parts as parts
    from swe17.agent import formats
    from swe17.rollout import proxy
    from swe17.store import kv

    self.parts, self.cfg, self.asked = parts, cfg, asked
    self.fmt = formats.load()
    self.weights = parts.Weights(cfg, self.fmt.vocab_size, _SEED.value)
    self.samplers = parts.Samplers(cfg)
    self.route = parts.Watched(
      kv.open(cfg.store), seconds=cfg.rollout.request_seconds, patience=180.0
    )
    self.proxy = proxy.Proxy(cfg, self.fmt, self.route)
    self.over = False  # no new episodes
    self.episodes: list[tuple[str, types.Episode]] = []  # (name, episode)
    self.wrong: list[str] = []
    self.rng = random.Random(_SEED.value)

  async def run(self) -> None:
    """Runs it to its end."""
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
          timeout=aiohttp.ClientTimeout(total=self.cfg.rollout.turn_seconds),
        )
      )
      beside = [
        asyncio.ensure_future(each)
        for each in (self.samplers.supervise(), self._publish(), self._discover())
      ]
      agents = [
        asyncio.ensure_future(self._agent(http, i)) for i in range(self.asked['agents'])
      ]
      killing = asyncio.ensure_future(self._kill())
      # What ends early has failed: the rest would only hide it.
      done, _ = await asyncio.wait(
        [killing, *beside], return_when=asyncio.FIRST_COMPLETED
      )
      for one in done:
        one.result()
      self.over = True
      async with asyncio.timeout(_END):
        await asyncio.gather(*agents)
      for one in beside:
        one.cancel()
      await asyncio.gather(*beside, return_exceptions=True)

  async def _until_up(self) -> None:
    until = time.monotonic() + _UP
    while await self.route.discover() < self.cfg.sampler.processes:
      if time.monotonic() > until:
        raise TimeoutError(f'samplers did not serve within {_UP:g} s')
      await asyncio.sleep(0.2)
    print(f'{self.cfg.sampler.processes} samplers serve', file=sys.stderr)

  async def _publish(self) -> None:
    while True:
      await asyncio.sleep(self.asked['publish'])
      await asyncio.to_thread(self.weights.publish)

  async def _discover(self) -> None:
    while True:
      await asyncio.sleep(1.0)
      await self.route.discover()

  async def _kill(self) -> None:
    """Kills one sampler after another; about the middle, all."""
    every = range(self.cfg.sampler.processes)
    for i in range(self.asked['kills']):
      await asyncio.sleep(self.asked['every'])
      whole = i == self.asked['kills'] // 2
      self.samplers.kill(list(every) if whole else [self.rng.choice(every)])
      print(
        f'kill {i}: {"all" if whole else "one"}, {len(self.episodes)} episodes, '
        f'version {len(self.weights.versions) - 1}',
        file=sys.stderr,
      )
    await asyncio.sleep(self.asked['every'])

  async def _agent(self, http: aiohttp.ClientSession, i: int) -> None:
    """Episode after episode."""
    n = 0
    while not self.over:
      group_id = f'{i:04d}-{n}'
      opened = self.proxy.open_episode(group_id, 0)
      agent = self.parts.Agent(http, opened.base_url, f'{_SEED.value}/{group_id}')
      reason = ''
      try:
        await agent.run()
      except ConnectionError as e:
        reason = str(e)
      served = self.proxy.close_episode(opened.key)
      outcome = types.Outcome(None, reason) if reason else types.Outcome(1.0)
      made = served.episode(_TASK, group_id, 0, outcome, submitted=not reason)
      name = f'{group_id}.0'
      self.episodes.append((name, made))
      answers = self.route.by_episode.get(name, [])
      if broken := self.parts.corrupt(served, agent, answers):
        self.wrong.append(f'{name}: {broken}')
      n += 1

  def check(self) -> dict[str, Any]:
    """Scores a seeded part of the answers. What was found, as JSON."""
    from experiments.bench import chaos_check

    answers = self.route.answers
    before: list[set[int]] = []
    drawn: dict[str, set[int]] = {}
    for answer in answers:
      known = drawn.setdefault(answer.episode, set())
      before.append(set(known))
      known.update(answer.result.version_T.tolist())
    unsound = [a.episode for a in answers if not chaos_check.sets_hold(a.result)]
    self.wrong += [f'{name}: a token outside its set' for name in unsound]
    chosen = self.rng.sample(
      range(len(answers)), min(self.asked['checked'], len(answers))
    )
    checker = chaos_check.Checker(self.cfg, self.weights.params)
    found = checker.check([answers[i] for i in chosen], [before[i] for i in chosen])
    self.wrong += ['an answer that its weights did not draw'] * found.wrong
    if found.drawn_again < 0.99 * found.tokens or found.same_set < 0.99 * found.tokens:
      self.wrong.append('tokens that their keys do not draw')
    if found.plain and found.control_mean < 100 * chaos_check.FLOOR:
      self.wrong.append('another version would have done as well: nothing was checked')
    return vars(found)


def report(chaos: Chaos, seconds: float) -> dict[str, Any]:
  """The record of a run."""
  checked = chaos.check()
  route, samplers = chaos.route, chaos.samplers
  lost = [name for name, one in chaos.episodes if one.outcome.value is None]
  tokens = sum(a.result.token_T.size for a in route.answers)
  for text in [*chaos.wrong[:10], *(f'lost: {name}' for name in lost[:10])]:
    print(text, file=sys.stderr)
  return {
    'episodes': len(chaos.episodes),
    'kills': samplers.kills,
    'lost': len(lost),
    'corrupted': len(chaos.wrong),
    'seconds_lost_a_kill': sum(samplers.down) / max(1, len(samplers.down)),
    'seconds_to_go_on': route.lost_seconds / max(1, route.rerouted),
    'rerouted': route.rerouted,
    'resumed': route.resumed,
    'waited': route.waited,
    'versions': len(chaos.weights.versions),
    'answers': len(route.answers),
    'tokens_a_second': tokens / seconds,
    'checked': checked,
    'seconds': seconds,
  }


def main(_: Sequence[str]) -> int:
  logging.set_verbosity(logging.ERROR)  # deaths of samplers are no news
  asked = sizes()
  with tempfile.TemporaryDirectory(prefix='chaos-') as name:
    folder = pathlib.Path(name)
    process.prepare_jax(config.Config(run_dir=name), 'learner', 0)
    from experiments.bench import chaos_parts as parts

    cfg = parts.settings_of(folder, asked['samplers'], asked['agents'])
    chaos = Chaos(cfg, asked)
    began = time.monotonic()
    asyncio.run(chaos.run())
    found = report(chaos, time.monotonic() - began)
  print(json.dumps(found))
  return int(bool(found['lost'] or found['corrupted']))


if __name__ == '__main__':
  program.run(main, FLAGS)
