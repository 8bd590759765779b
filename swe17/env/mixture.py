"""Several families as one: their tasks in turn, each in an environment of its own."""

from collections.abc import Sequence
import dataclasses
import itertools

from swe17 import config, types
from swe17.env import base


def of(families: Sequence[base.Family]) -> base.Family:
  """Tasks of all. `tasks.train` and `heldout` count those of each; a kind that only
  one family has chooses among its tasks only. ValueError if a family comes twice."""
  names = [family.name for family in families]
  if len(set(names)) < len(names):
    raise ValueError(f'tasks.family: got {",".join(names)}, want every family once')

  def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
    if cfg.table:
      raise ValueError(f'tasks.table: one for {len(names)} families; leave it out')
    found, set_aside = [], dict[str, str]()
    for family in families:
      own = [kind for kind in cfg.kinds.split(',') if kind.strip() in family.kinds]
      settings = dataclasses.replace(cfg, family=family.name, kinds=','.join(own))
      tasks, aside = family.read(settings)
      found.append(tasks)
      set_aside |= aside
    return tuple(_in_turn(found)), set_aside

  async def open_host(cfg: config.Sandbox) -> Host:
    hosts: dict[str, base.Host] = {}
    try:
      for family in families:
        hosts[family.name] = await family.open(cfg)
    except BaseException:
      await Host(hosts).close()
      raise
    return Host(hosts)

  kinds = tuple(kind for family in families for kind in family.kinds)
  return base.Family(','.join(names), read, open_host, kinds, families[0].tokenizer)


def _in_turn(found: Sequence[Sequence[types.Task]]) -> list[types.Task]:
  """One task of each family after another, as long as all have some."""
  rounds = itertools.zip_longest(*found)
  return [task for tasks in rounds for task in tasks if task is not None]


class Host:
  """The hosts of several families."""

  def __init__(self, hosts: dict[str, base.Host]):
    self._hosts = hosts

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    sound, set_aside = set[str](), dict[str, str]()
    changed: dict[str, types.Task] = {}
    for name, host in self._hosts.items():
      good, bad = await host.verify([task for task in tasks if task.family == name])
      changed |= {task.id: task for task in good}
      sound |= {task.id for task in good}
      set_aside |= bad
    return [changed[task.id] for task in tasks if task.id in sound], set_aside

  def env(self, task: types.Task) -> base.Env:
    return self._hosts[task.family].env(task)

  async def close(self) -> None:
    for host in self._hosts.values():
      await host.close()
