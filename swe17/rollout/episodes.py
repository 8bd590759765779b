"""What episodes need on this machine (tasks, graders, a format), and one episode.

Shared by training rollouts, evaluation and scripted episodes, so that all three run the
same loop on the same environments.
"""

import asyncio
from collections.abc import Callable
import dataclasses
import logging
import math

from swe17 import config, types
from swe17.agent import episode, formats
from swe17.env import grader, repair, repair_shell
from swe17.rollout import harness as harnesses

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class World:
  """Verified tasks and what runs them. Close it: graders are processes."""

  cfg: config.Config
  train: list[types.Task]
  heldout: list[types.Task]
  set_aside: dict[str, str]  # task id -> reason
  graders: grader.Graders
  verifier: repair.Verifier
  fmt: formats.Format
  harness: harnesses.Harness | None = None  # of `agent.harness`, once opened

  async def close(self) -> None:
    await self.graders.close()

  async def episode(
    self,
    task: types.Task,
    generate: episode.Generate,
    group_id: str,
    member: int,
    sampling: types.Sampling,
    *,
    seconds: float = math.inf,
    min_version: int = 0,
  ) -> types.Episode:
    """Runs one episode to its end, or until `seconds` are over if that is sooner.

    With a harness it is that one's agent, behind its proxy: `generate` is not asked.
    """
    agent = self.cfg.agent
    if self.harness is not None:
      return await self.harness.episode(
        task, group_id, member, sampling, seconds=seconds, min_version=min_version
      )
    return await episode.run(
      task=task,
      env=repair.RepairEnv(task, self.verifier),
      generate=generate,
      fmt=self.fmt,
      cfg=dataclasses.replace(
        agent, episode_seconds=min(seconds, agent.episode_seconds)
      ),
      sampling=sampling,
      seed=self.cfg.seed,
      group_id=group_id,
      member=member,
    )


async def open_world(cfg: config.Config, says: Callable[[str], None]) -> World:
  """Starts graders, regenerates the tasks and verifies each once more.

  Raises:
    ValueError: fewer tasks than `cfg.tasks` asks for are sound, or the model's format
      is not what `cfg.agent` asks for.
    grader.GraderError: the sandbox does not start.
  """
  fmt = formats.load(cfg.model.source)
  if cfg.agent.thoughts == 'strip' and not fmt.strips:
    raise ValueError(
      'agent.thoughts=strip: this chat template opens every thought itself, so that '
      'none can be taken out of a turn; keep them'
    )
  if cfg.agent.thoughts == 'keep' and fmt.rewrites:
    _log.warning(
      'the chat template, asked for a later turn, rewrites earlier ones: %s. Contexts '
      'are kept as they were served (agent.thoughts=strip drops thoughts)',
      fmt.rewrites,
    )
  says('regenerating tasks')
  tasks, set_aside = repair.read(cfg.tasks)
  if cfg.agent.harness:
    tasks, unfit = await asyncio.to_thread(repair_shell.usable, tasks)
    set_aside = {**set_aside, **unfit}
  graders = grader.Graders(cfg.sandbox)
  await graders.start()
  says(f'verifying {len(tasks)} tasks')
  sound, unsound = await repair.verify(tasks, graders)
  set_aside = {**set_aside, **unsound}
  for task_id, reason in set_aside.items():
    _log.warning('task %s set aside: %s', task_id, reason)
  split = {s: [t for t in sound if t.split == s] for s in ('train', 'heldout')}
  for name, found in split.items():
    if not found:
      await graders.close()
      raise ValueError(f'no sound {name} task is left; {len(set_aside)} were set aside')
  says(f'{len(sound)} tasks verified, {len(set_aside)} set aside')
  return World(
    cfg,
    split['train'],
    split['heldout'],
    set_aside,
    graders,
    repair.Verifier(graders),
    fmt,
  )
