"""The family `harbor`: task folders of Harbor and Terminal-Bench 2 (harbor_tasks.py).

  tasks.root    a folder with task folders below it
  tasks.place   container: in the image that task.toml names;
                local: on this machine's own programs, if the Dockerfile only copies
                files (dockerfiles.py)

At the end tests/ is put beside what the agent has left, test.sh runs in the work
directory, and the reward is what it writes: /logs/verifier/reward.json, a number or one
under `reward`, else /logs/verifier/reward.txt. There is never a network, whatever
task.toml allows. A task is sound if its solution is rewarded with 1 and an untouched
folder with less, so that what its tests try to install is known not to matter. After
that, an episode without a reward is one whose agent has broken its tests: 0.

A verifier that shares its place with the agent is as good as its test.sh. Files by
which an agent could get into a Python before the tests are removed, if the task is not
about them, and are a sign of cheating; so is a reward that was there before.

Source: harbor 0.26.0, harbor/verifier/verifier.py.
"""

import asyncio
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any
import weakref

from swe17 import config, types
from swe17.env import base, sandbox
from swe17.env.formats import harbor_places, harbor_tasks, swe_bench, workspace

FAMILY = 'harbor'
PROMPT = """{instruction}

Every command is run in a shell of its own, in {workdir}: only files stay. There is no \
network. Submit when it is done."""


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The tasks below `cfg.root`, and set-aside id -> reason.

  ValueError if there is no such folder, or fewer are left than asked for.
  """
  root = pathlib.Path(cfg.root or '/none')
  if not root.is_dir():
    raise ValueError(f'tasks.root: got {cfg.root!r}, want a folder of task folders')
  made: list[types.Task] = []
  aside: dict[str, str] = {}
  for path in harbor_tasks.find(root):
    try:
      folder = harbor_tasks.read(path)
      task = _task(cfg, folder, path)
    except ValueError as e:  # Refused, NotPlain
      aside[path.relative_to(root).as_posix()] = str(e)
      continue
    if task.id in {other.id for other in made}:
      raise ValueError(f'{path}: another folder has the name {task.id!r}')
    made.append(task)
  held = swe_bench.heldout(cfg.units, [task.unit for task in made])
  made = [
    dataclasses.replace(task, split='heldout' if task.unit in held else 'train')
    for task in made
  ]
  return swe_bench.chosen(cfg, made, aside), aside


def _task(
  cfg: config.Tasks, folder: harbor_tasks.Folder, path: pathlib.Path
) -> types.Task:
  """The task of a folder. NotPlain or Refused if it cannot run where it is to."""
  workdir = folder.workdir
  if cfg.place == 'local':
    workdir = harbor_places.start(folder).workdir
  elif not folder.image:
    raise harbor_tasks.Refused(
      'environment/Dockerfile: images are not built here; build it and name it in '
      'environment.docker_image (tasks.place=local takes files alone)'
    )
  elif 'Dockerfile' not in folder.context and folder.context:
    raise harbor_tasks.Refused('environment/: files beside environment.docker_image')
  payload = {'place': cfg.place, 'folder': str(path.resolve())}
  prompt = PROMPT.format(
    instruction=folder.instruction, workdir=workdir or 'the work directory'
  )
  return types.Task(folder.id, FAMILY, 'train', folder.id, prompt, payload)


class HarborEnv(workspace.BashEnv):
  """One episode on one task that `verify` found sound."""

  rules: base.Rules = 'machine'

  def __init__(self, task: types.Task, place: harbor_places.Place):
    super().__init__(task.prompt, place.open)
    self._place = place

  async def _grade(self, work: workspace.Workspace) -> types.Outcome:
    """What the task's own tests give."""
    try:
      got = await self._place.grade(work)
    except OSError as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    self.flags = got.signs
    if got.signs:
      return types.Outcome(0.0, f'cheating: {got.signs[0]}')
    if isinstance(got.reward, str):  # of a verifier that wrote one for the solution
      return types.Outcome(0.0, got.reward)
    return types.Outcome(got.reward)


class Host:
  """What the episodes of a process share."""

  def __init__(self, cfg: config.Sandbox):
    self._cfg = cfg
    self._backend = ''
    self._gate = asyncio.Semaphore(cfg.workers)
    self._made = weakref.WeakSet[HarborEnv]()
    self._places: dict[str, harbor_places.Place] = {}

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Grades every solution and every untouched folder: (sound, set-aside -> why)."""
    return await swe_bench.examined(tasks, self._examine)

  async def _place(self, task: types.Task) -> harbor_places.Place:
    """Where a task runs. ValueError: it cannot."""
    folder = harbor_tasks.read(pathlib.Path(task.payload['folder']))
    if task.payload['place'] == 'container':
      return harbor_places.Boxed(self._cfg, folder)
    if not self._backend:
      self._backend = await asyncio.to_thread(sandbox.choose_backend, self._cfg)
    if self._backend != 'bubblewrap':
      raise ValueError(
        f'tasks.place=local with sandbox.backend={self._backend}: paths of such tasks '
        'begin at /, which needs bubblewrap'
      )
    return harbor_places.Local(self._cfg, folder)

  async def _examine(self, task: types.Task) -> types.Task | str:
    async with self._gate:
      try:
        place = await self._place(task)
        calls = place.gold()
        rewards = [await self._reward(place, made) for made in (calls, [])]
      except ValueError as e:
        return str(e)
      except OSError as e:
        return f'the verifier failed: {e}'
    good, null = rewards
    for name, got in (('its solution', good), ('an untouched folder', null)):
      if isinstance(got, str):
        return f'with {name}: {got}'
    assert isinstance(good, float) and isinstance(null, float)
    if good < task.solved_at:
      return f'its solution is rewarded with {good:g}, want {task.solved_at:g}'
    if null >= good:
      return f'an untouched folder is rewarded with {null:g}, as its solution is'
    self._places[task.id] = place
    return dataclasses.replace(task, payload={**task.payload, 'gold': calls})

  async def _reward(
    self, place: harbor_places.Place, calls: Sequence[Sequence[Any]]
  ) -> float | str:
    work = await place.open()
    try:
      for name, arguments in calls:
        if name == 'bash':
          await work.run(arguments['command'], harbor_places.SOLUTION_SECONDS)
      return (await place.grade(work)).reward
    finally:
      await work.close()

  def env(self, task: types.Task) -> HarborEnv:
    if task.id not in self._places:
      raise ValueError(f'task {task.id}: not examined; pass it to verify first')
    made = HarborEnv(task, self._places[task.id])
    self._made.add(made)
    return made

  async def close(self) -> None:
    for env in list(self._made):
      await env.close()


async def open_host(cfg: config.Sandbox) -> Host:
  """A host; sandboxes are started when tasks need them."""
  return Host(cfg)
