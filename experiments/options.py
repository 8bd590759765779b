"""A command line, a config file and (on resume) a run folder, as checked settings.

Flags win over the file, the file over the defaults; each leaf remembers which. Config
files are Python: `get_config(argument)` returns nested settings, which
`ml_collections.config_flags` lets flags change (`--config.optim.lr=3e-4`). Only
`experiments/` and `launch/` read flags.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import difflib
import importlib.util
import json
import os
import pathlib
import re
import time
import traceback
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags

from swe17 import config, settings
from swe17.env import families

ROLES = ('local', 'learner', 'sampler', 'rollout', 'controller', 'relay')
_INDEXED = ('sampler', 'rollout', 'relay', 'learner')  # roles of several processes
_FLAGS = ('--config', '--role', '--index', '--run_dir', '--resume')
_BOOLEANS = ('true', 't', '1', 'false', 'f', '0')  # as absl reads them
_SETTING = re.compile(r'--?(?:no)?config\.([^=]*)')


@dataclasses.dataclass(frozen=True)
class Options:
  """A command line, understood."""

  role: str
  index: int
  resume: bool
  parent: int
  cfg: config.Config
  origin: Mapping[str, str]


def parse(argv: Sequence[str]) -> Options:
  """Flags, config file and (on resume) the run folder's settings as `Options`.

  ValueError or flags.Error names what is wrong. Nothing heavy is imported.
  """
  spec, rest = _split(argv)
  for arg in rest:
    if found := _SETTING.match(arg):
      _check_setting(found[1], arg)
  chosen = _flags(rest)
  spawned = chosen.role != 'local'
  if (chosen.resume or spawned) and not chosen.run_dir:
    raise ValueError(
      f'--{"role" if spawned else "resume"} needs --run_dir=<run folder>'
    )
  if chosen.index and chosen.role not in _INDEXED:
    raise ValueError(
      f'--index={chosen.index} is for --role={" or ".join(_INDEXED)} only'
    )
  if not (spec or chosen.resume or spawned):
    raise ValueError(
      'nothing to run: give --config=experiments/configs/quickstart.py (see --help)'
    )
  if spawned and (spec or any(map(_SETTING.match, rest))):
    raise ValueError(
      f'--role={chosen.role} takes its settings from the run folder: leave out --config'
    )
  stored = _stored(chosen.run_dir) if chosen.resume or spawned else None
  cfg, origin = _settle(spec, rest, chosen, stored)
  if spawned:
    cfg = settings.load(chosen.run_dir)
  _check_index(chosen.role, chosen.index, cfg)
  return Options(chosen.role, chosen.index, chosen.resume, chosen.parent, cfg, origin)


def _check_index(role: str, index: int, cfg: config.Config) -> None:
  """ValueError unless the run has such a process."""
  if role in ('controller', 'relay') and not cfg.relay.enabled:
    raise ValueError(f'--role={role}: the run has no relay (relay.enabled=False)')
  if role not in _INDEXED:
    return
  of = {'relay': 'sampler', 'learner': 'mesh'}.get(role, role)
  processes = getattr(cfg, of).processes
  why = f'{of}.processes={processes}'
  least, most = (1, cfg.relay_nodes) if role == 'relay' else (0, processes)
  if not least <= index < most:
    raise ValueError(f'--index: got {index}, want {least} .. {most - 1} ({why})')


def _split(argv: Sequence[str]) -> tuple[str, list[str]]:
  """Takes `--config=file.py[:arg]` out of the command line."""
  spec, rest, left = '', [], list(argv)
  while left:
    arg = left.pop(0)
    name, equals, value = arg.partition('=')
    if name not in ('--config', '-config'):
      rest.append(arg)
    elif equals:
      spec = value
    elif left:
      spec = left.pop(0)
    if name in ('--config', '-config') and not spec:
      raise ValueError('--config: got nothing, want a file, e.g. --config=mine.py')
  return spec, rest


def _check_setting(name: str, arg: str) -> None:
  """ValueError unless `name` is a setting: a section or a misspelling is not."""
  leaves = settings.leaves()
  if name in leaves:
    value = arg.partition('=')[2]
    if leaves[name].type is bool and value and value.lower() not in _BOOLEANS:
      raise ValueError(f'{name}: got {value!r}, want true or false')
    return
  inside = [leaf for leaf in leaves if leaf.startswith(f'{name}.')]
  if inside:
    raise ValueError(
      f'--config.{name} is a section: set one of its settings, e.g. '
      f'--config.{inside[0]}=...'
    )
  raise ValueError(f'unknown setting {name}; the nearest is {settings.nearest(name)}')


def _flags(rest: Sequence[str], values: ml_collections.ConfigDict | None = None):
  """Parses `rest`. Settings in it change `values` in place (default: a scrap copy)."""
  scrap = settings.default() if values is None else values
  parsed = flags.FlagValues()
  flags.DEFINE_enum('role', 'local', ROLES, 'part to run', parsed)
  flags.DEFINE_integer('index', 0, 'which process of the role', flag_values=parsed)
  flags.DEFINE_string('run_dir', '', 'run folder', flag_values=parsed)
  flags.DEFINE_bool('resume', False, 'go on with the run', flag_values=parsed)
  flags.DEFINE_integer('parent', 0, 'end with this process', flag_values=parsed)
  config_flags.DEFINE_config_dict(
    'config', scrap, flag_values=parsed, sys_argv=['swe17', *rest], lock_config=True
  )
  try:
    extra = parsed(['swe17', *rest])[1:]
  except flags.UnrecognizedFlagError as e:
    near = f'--config.{settings.nearest(e.flagname)}'
    near = (difflib.get_close_matches(e.flagname, _FLAGS, 1) or [near])[0]
    raise ValueError(f'unknown flag --{e.flagname}; the nearest is {near}') from e
  if extra:
    raise ValueError(
      f'unexpected argument {extra[0]!r}: settings are --config.name=value'
    )
  return parsed


def _settle(
  spec: str, rest: Sequence[str], chosen: Any, stored: dict[str, Any] | None
) -> tuple[config.Config, dict[str, str]]:
  """The settings of this start and where each came from."""
  old = None if stored is None else settings.from_json(stored)
  if spec or old is None:
    loaded = load_file(spec)
  else:
    loaded = dataclasses.asdict(old)
  values = _over_defaults(loaded)
  _flags(rest, values)
  cfg = settings.resolve(values)
  by_flag = {found[1] for found in map(_SETTING.match, rest) if found}
  origin = settings.origins(loaded, by_flag)
  if cfg.model.source and (old is None or cfg.model != old.model):
    cfg, shape = _with_source(cfg, by_flag)
    origin |= dict.fromkeys(shape, 'source')
  if stored is not None and not spec:
    kept = {name: leaf['origin'] for name, leaf in stored.items()}
    origin = {name: 'flag' if name in by_flag else kept[name] for name in origin}
  if chosen.run_dir:
    origin['run_dir'] = 'flag'
  folder = chosen.run_dir or cfg.run_dir or _folder(spec)
  table = cfg.tasks.table and os.path.abspath(cfg.tasks.table)
  if table and not os.path.isfile(table):
    raise ValueError(f'tasks.table: no file at {table}')
  _check_kinds(cfg.tasks)
  # Children may start elsewhere: from here on every path is absolute.
  cfg = dataclasses.replace(
    cfg,
    run_dir=os.path.abspath(folder),
    tasks=dataclasses.replace(cfg.tasks, table=table),
  )
  if old is not None:
    _check_same(cfg, old)
  return cfg, origin


def _check_kinds(tasks: config.Tasks) -> None:
  """ValueError if `tasks.kinds` names a kind that the family does not have."""
  if not tasks.kinds:
    return
  family = families.get(tasks.family)
  for kind in map(str.strip, tasks.kinds.split(',')):
    if kind not in family.kinds:
      near = difflib.get_close_matches(kind, family.kinds, 1, cutoff=0.0)
      hint = f'the nearest is {near[0]!r} of {", ".join(family.kinds)}' if near else ''
      hint = hint or f'{tasks.family} has none to choose from'
      raise ValueError(f'tasks.kinds: got {kind!r}; {hint}')


def load_file(spec: str) -> dict[str, Any]:
  """Nested settings from `get_config` of `file.py[:argument]`. ValueError if not."""
  name, _, argument = spec.partition(':')
  path = pathlib.Path(name)
  if not path.is_file():
    others = [str(other) for other in path.parent.glob('*.py')]
    near = difflib.get_close_matches(str(path), others, 1)
    hint = f'; did you mean {near[0]}?' if near else ''
    raise ValueError(f'no config file at {name}{hint}')
  where = importlib.util.spec_from_file_location('swe17_config', path)
  if where is None or where.loader is None:
    raise ValueError(f'config file {name}: got no Python file, want one')
  module = importlib.util.module_from_spec(where)
  try:
    where.loader.exec_module(module)
    values = module.get_config(*([argument] if argument else []))
  except Exception as e:
    # Somebody else's code: whatever it raises is bad input, said with its place.
    frames = [
      f for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)
    ]
    line = f' line {frames[-1].lineno}' if frames else ''
    said = str(e) if isinstance(e, ValueError) else f'{type(e).__name__}: {e}'
    raise ValueError(f'config file {name}{line}: {said}') from e
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  if not isinstance(values, dict):
    raise ValueError(
      f'config file {name}: get_config returned {values!r}, want settings'
    )
  return values


def _with_source(
  cfg: config.Config, by_flag: Collection[str]
) -> tuple[config.Config, set[str]]:
  """The settings with the shape of the model at `model.source`, and what it gave.

  ValueError names a setting of the shape that says something else: one of the shape's
  that a flag set, even to its default.
  """
  # Imported here: most runs have no source.
  from swe17.model import source

  model = source.settle(cfg.model)
  settled = dataclasses.replace(cfg, model=model)
  asked, found = settings.flatten(cfg), settings.flatten(settled)
  shape = {
    name
    for name, value in found.items()
    if value != asked[name] and name != 'model.source'
  }
  for name in sorted(shape & set(by_flag)):
    raise ValueError(
      f'{name}: got {asked[name]!r}, the files of model.source={cfg.model.source} have '
      f'{found[name]!r} (leave the shape out: it is read)'
    )
  return settled, shape


def _over_defaults(loaded: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """The defaults with `loaded` on top; what is unknown stays in, for `resolve`."""

  def over(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
      below = base.get(name)
      if isinstance(below, dict) and isinstance(value, Mapping):
        value = over(below, value)
      elif type(below) is float and type(value) is int:
        value = float(value)  # so that a flag may give it a fraction
      merged[name] = value
    return merged

  return ml_collections.ConfigDict(over(settings.default().to_dict(), loaded))


def _stored(run_dir: str) -> dict[str, Any]:
  path = pathlib.Path(run_dir) / 'config.json'
  if not path.is_file():
    raise ValueError(f'no run in {os.path.abspath(run_dir)}: it has no config.json')
  settings.load(run_dir)  # says what is wrong with it
  return json.loads(path.read_text())


def _check_same(cfg: config.Config, old: config.Config) -> None:
  """ValueError if a resumed run would go on under settings with another meaning."""
  now, then = settings.flatten(cfg), settings.flatten(old)
  changed = [
    f'{name}={value!r} (the run has {then[name]!r})'
    for name, value in now.items()
    if value != then[name] and name not in settings.CHANGEABLE
  ]
  if changed:
    raise ValueError(
      f'cannot resume with other settings: {", ".join(changed)}; leave them out, or '
      'start a new run'
    )


def _folder(spec: str) -> str:
  name, _, argument = spec.partition(':')
  parts = [pathlib.Path(name).stem, argument, time.strftime('%Y%m%d-%H%M%S')]
  return os.path.join('runs', '-'.join(part for part in parts if part))
