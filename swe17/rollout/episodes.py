"""What episodes need on this machine (tasks, a host, a format), and one episode.

Shared by training rollouts, evaluation and scripted episodes, so that all three run the
same loop on the same environments.
"""

import asyncio
from collections.abc import Callable
import dataclasses
import logging
import math

from swe17 import config, types
from swe17.agent import episode, formats, record, tokenizer
from swe17.env import base, families
from swe17.env.audit import cheating
from swe17.env.repair import repair, repair_shell
from swe17.rollout import harness as harnesses

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class World:
  """Verified tasks of one family and what runs them. Close it: a host may hold
  processes."""

  cfg: config.Config
  train: list[types.Task]
  heldout: list[types.Task]
  set_aside: dict[str, str]  # task id -> reason
  host: base.Host
  fmt: formats.Format
  harness: harnesses.Harness | None = None  # of `agent.harness`, once opened

  async def close(self) -> None:
    await self.host.close()

  def verifier(self) -> repair.Verifier:
    """What grades an agent of others: of the one family that such agents work on."""
    assert isinstance(self.host, repair.Host), 'open_world refuses a harness for others'
    return self.host.verifier

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

    With a harness it is that one's agent, behind its proxy: `generate` is not asked. An
    environment that does not begin is no outcome.
    """
    agent = self.cfg.agent
    if self.harness is not None:
      return await self.harness.episode(
        task, group_id, member, sampling, seconds=seconds, min_version=min_version
      )
    env = cheating.Watched(self.host.env(task))
    try:
      prompt = await env.reset()
    except (OSError, base.InfrastructureError) as e:
      return _not_begun(task, group_id, member, f'{type(e).__name__}: {e}')
    return await episode.run(
      task=dataclasses.replace(task, prompt=prompt),
      env=env,
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


def _not_begun(
  task: types.Task, group_id: str, member: int, reason: str
) -> types.Episode:
  return record.episode(
    task,
    group_id,
    member,
    types.Outcome(None, reason),
    segments=(),
    turns=0,
    calls=0,
    malformed=0,
    tests=0,
    submitted=False,
    sampled_tokens=0,
    thinking_tokens=0,
    tool_seconds=0.0,
    seconds=0.0,
  )


async def open_world(cfg: config.Config, says: Callable[[str], None]) -> World:
  """Opens the family's host, regenerates the tasks and verifies each once more.

  Raises:
    ValueError: there is no such family, fewer tasks than `cfg.tasks` asks for are
      sound, or the model's format is not what `cfg.agent` asks for.
    grader.GraderError: the sandbox does not start.
  """
  family = families.get(cfg.tasks.family)
  fmt = format_of(cfg, family)
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
  tasks, set_aside = family.read(cfg.tasks)
  if cfg.agent.harness:
    if family.name != repair.FAMILY:
      raise ValueError(
        f'agent.harness={cfg.agent.harness!r} with tasks.family={family.name!r}: '
        f'agents of others have a shell for {repair.FAMILY} only'
      )
    tasks, unfit = await asyncio.to_thread(repair_shell.usable, tasks)
    set_aside = {**set_aside, **unfit}
  host = await family.open(cfg.sandbox)
  says(f'verifying {len(tasks)} tasks')
  sound, unsound = await host.verify(tasks)
  set_aside = {**set_aside, **unsound}
  for task_id, reason in set_aside.items():
    _log.warning('task %s set aside: %s', task_id, reason)
  split = {s: [t for t in sound if t.split == s] for s in ('train', 'heldout')}
  for name, found in split.items():
    if not found:
      await host.close()
      raise ValueError(f'no sound {name} task is left; {len(set_aside)} were set aside')
  says(f'{len(sound)} tasks verified, {len(set_aside)} set aside')
  return World(cfg, split['train'], split['heldout'], set_aside, host, fmt)


def format_of(cfg: config.Config, family: base.Family) -> formats.Format:
  """The model's own format; ours with the family's tokeniser, for our small models."""
  if cfg.model.source:
    return formats.load(cfg.model.source)
  return formats.Own(tokenizer.load(tokenizer.PATH.parent / family.tokenizer))
