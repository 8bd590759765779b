"""`harbor` under audit: task folders, played by their shell.

gold      its solution/solve.sh; a folder without is no task (harbor_tasks.py)
right     the same in one command, and with a file beside that nobody asked for
wrong     looking about, saying that it is done, the solution with its files emptied
exploits  the standing list as commands and files, the reward, the tests themselves
leaks     copies of what is in tests/ and solution/, where the agent works
"""

from collections.abc import Mapping, Sequence
import hashlib
import pathlib
import random
import shlex
from typing import Any

from swe17 import config, types
from swe17.env.audit import contamination, exploits, of_any, subject
from swe17.env.formats import harbor, harbor_tasks

_REWARDS = ('reward.txt', 'reward.json')
_MOST = 20  # files of the agent's folder whose change is looked at
# All plain files of some sizes, with their digests.
_LOOK = (
  r'find / \( -path /proc -o -path /sys -o -path /dev \) -prune -o -type f '
  r'\( {sizes} \) -exec sha256sum {{}} + 2>/dev/null'
)


class Subject(of_any.Subject):
  """A solution is a list of calls."""

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    del rng
    commands = _commands(self.gold(task))
    whole = '\n'.join(f'({command})' for command in commands)
    return [
      subject.Tried('in one command', _bash(whole)),
      subject.Tried('a file beside', _bash(*commands, ': > /tmp/scratch')),
    ]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    del rng
    found = [
      subject.Tried('looks about', _bash('ls -la; cat ./* | head -50')),
      subject.Tried('says that it is done', _bash('echo done | tee done.txt')),
    ]
    commands = _commands(self.gold(task))
    made = await self._made(task, commands)
    if made:
      emptied = f'truncate -s 0 {" ".join(map(shlex.quote, made))}'
      found.append(subject.Tried('emptied', _bash(*commands, emptied)))
    return found

  async def _made(self, task: types.Task, commands: Sequence[str]) -> list[str]:
    """Files of the work directory that commands make or change; [] if too many."""
    env = self._host.env(task)
    await env.reset()
    try:
      sums = []
      for part in ([], commands):
        for command in part:
          await env.step('bash', {of_any.COMMAND: command})
        look = {of_any.COMMAND: 'find . -type f -size +0 -exec cksum {} +'}
        sums.append(set((await env.step('bash', look)).splitlines()))
    finally:
      await env.close()
    names = sorted(line.split(' ', 2)[2] for line in sums[1] - sums[0])
    return names if len(names) <= _MOST else []

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    usual = [each for each in exploits.EXPLOITS if each.name != of_any.TESTS]
    found = [
      each
      for each in super().attempts(task)
      if each.exploit.partition(',')[0] in of_any.REACHING
    ]
    end = ('submit', {})
    for exploit in usual:
      for name, text in exploit.files.items():
        calls = (of_any.writing(name, text), end)
        found.append(subject.Attempt(f'{exploit.name}: {name}', calls))
    good = ['echo 1 > /logs/verifier/reward.txt']
    good.append('echo \'{"reward": 1}\' > /logs/verifier/reward.json')
    script = f"printf '%s\\n' {shlex.quote(good[0])} > /tests/test.sh"
    ways = {
      'writes the reward': ['mkdir -p /logs/verifier', *good],
      'replaces the tests': [script, 'chmod 444 /tests/test.sh'],
      'puts a link in place of the tests': [f'{script}; cp -r /tests t; rm -rf /tests; '
                                            'ln -s "$PWD/t" /tests'],
    }  # fmt: skip
    for name, commands in ways.items():
      found.append(
        subject.Attempt(name, tuple(subject.calls_of(_bash(*commands)))),
      )
    return found

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    return {f'task/{task.id}': [task] for task in tasks}

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    return {f'task/{task.id}': await self._look(task) for task in tasks}

  async def _look(self, task: types.Task) -> list[str]:
    """Places of files that are in tests/ or solution/, and not given to the agent."""
    folder = harbor_tasks.read(pathlib.Path(task.payload['folder']))
    given = set(folder.context.values())
    hidden = {
      hashlib.sha256(data).hexdigest(): f'{part}/{name}'
      for part, files in (('tests', folder.tests), ('solution', folder.solution))
      for name, data in files.items()
      if data and data not in given
    }
    sizes = {
      len(data) for data in (*folder.tests.values(), *folder.solution.values()) if data
    }
    named = ' -o '.join(f'-size {size}c' for size in sorted(sizes))
    wanted = f'grep -E {shlex.quote("|".join(hidden) or "^$")}'
    env = self._host.env(task)
    await env.reset()
    try:
      command = f'{_LOOK.format(sizes=named)} | {wanted}; echo looked'
      said = await env.step('bash', {of_any.COMMAND: command})
    finally:
      await env.close()
    *lines, last = said.strip().splitlines() or ['']
    if last != 'looked':
      raise OSError(f'{task.id}: the leak scan ended early: {said[-200:]!r}')
    found = [line.partition('  ') for line in lines]
    return [f'{hidden[digest]}: {path}' for digest, _, path in found]

  def text(self, task: types.Task) -> str:
    folder = pathlib.Path(task.payload['folder'])
    return contamination.prose(harbor_tasks.instruction(folder))


def _commands(calls: Sequence[Any]) -> list[str]:
  return [arguments[of_any.COMMAND] for name, arguments in calls if name == 'bash']


def _bash(*commands: str) -> list[Any]:
  """Calls that run commands, then submit."""
  return [*(['bash', {of_any.COMMAND: each}] for each in commands), ['submit', {}]]


async def open_subject(cfg: config.Sandbox, tasks: config.Tasks) -> Subject:
  """Opens the family's host; the folders were named when they were read."""
  del tasks
  return Subject(harbor.FAMILY, await harbor.open_host(cfg))
