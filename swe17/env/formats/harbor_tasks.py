"""Task folders of Harbor (and of Terminal-Bench from version 2), read and judged.

  task.toml        what the task needs          instruction.md   what the agent is told
  environment/     a Dockerfile and its files   tests/test.sh    writes the reward
  solution/        solve.sh, the gold

Source: harbor 0.26.0, harbor/models/task/config.py and paths.py (schema_version 1.4).
Every setting that changes what a task is, is either followed or refused with a reason;
a setting that is unknown in the sections about that is refused too. `metadata` and
what only labels a task is not looked at.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import pathlib
import re
import tomllib
from typing import Any

MAX_BYTES = 8 << 20  # of one part of a task
_SECTIONS = {
  '': 'schema_version version task metadata verifier agent environment solution source '
  'multi_step_reward_strategy steps artifacts',
  'agent': 'network_mode allowed_hosts timeout_sec user',
  'verifier': 'network_mode allowed_hosts timeout_sec env user environment_mode '
  'environment collect',
  'environment': 'network_mode allowed_hosts build_timeout_sec docker_image os cpus '
  'memory_mb storage_mb gpus gpu_types tpu mcp_servers env skills_dir healthcheck '
  'workdir allow_internet memory storage',
  'solution': 'env',
}
_CANARY = re.compile(r'(<!--.*canary.*-->|#.*canary.*)', re.IGNORECASE)
_SIZE = re.compile(r'(\d+(?:\.\d+)?)([GMK])', re.IGNORECASE)
_MIB = {'G': 1024.0, 'M': 1.0, 'K': 1 / 1024}


@dataclasses.dataclass(frozen=True)
class Folder:
  """A task that can be run, with its files. Paths in `tests` and so on are relative."""

  id: str
  instruction: str
  image: str  # '' if there is only a Dockerfile
  dockerfile: str  # '' if there is only an image
  workdir: str  # '' where the image or the Dockerfile says
  memory_mib: int  # 0: any
  verifier_seconds: float
  env: Mapping[str, str]
  verifier_env: Mapping[str, str]
  solution_env: Mapping[str, str]
  context: Mapping[str, bytes]  # environment/, the Dockerfile included
  tests: Mapping[str, bytes]
  solution: Mapping[str, bytes]


class Refused(ValueError):
  """A folder is no task that can be run here; the text says why."""


def find(root: pathlib.Path) -> list[pathlib.Path]:
  """Task folders of `root`: those with a task.toml, or the older task.yaml."""
  found = {
    path.parent for name in ('task.toml', 'task.yaml') for path in root.rglob(name)
  }
  return sorted(found)


def read(path: pathlib.Path) -> Folder:
  """One task folder. Refused says what it lacks, or wants that is not to be had."""
  file = path / 'task.toml'
  if not file.is_file():
    raise Refused(
      'a Terminal-Bench 1 folder (task.yaml): it runs under docker-compose and is '
      'graded from a log; `harbor tasks migrate` makes a task.toml of it'
    )
  try:
    told = tomllib.loads(file.read_text(encoding='utf-8'))
  except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
    raise Refused(f'task.toml: {e}') from e
  _known(told)
  environment, verifier = _section(told, 'environment'), _section(told, 'verifier')
  _refuse_general(told)
  _refuse_environment(environment)
  _refuse_verifier(verifier)
  for name in ('agent', 'verifier'):
    user = _section(told, name).get('user')
    if user not in (None, 'root', 0):
      raise Refused(f'{name}.user: it wants user {user!r}')
  parts = {name: files(path / name) for name in ('environment', 'tests', 'solution')}
  if 'docker-compose.yaml' in parts['environment']:
    raise Refused('environment/docker-compose.yaml: several containers do not run here')
  if {'Dockerfile', 'docker-compose.yaml'} & set(parts['tests']):
    raise Refused('tests/Dockerfile: the verifier has an image of its own')
  if 'test.sh' not in parts['tests']:
    raise Refused('no tests/test.sh')
  if 'solve.sh' not in parts['solution']:
    raise Refused('no solution/solve.sh: nothing shows that it can be solved')
  image = _text(environment, 'environment.docker_image')
  dockerfile = parts['environment'].get('Dockerfile', b'').decode('utf-8', 'replace')
  if not image and not dockerfile:
    raise Refused('neither environment.docker_image nor environment/Dockerfile')
  package = told.get('task') or {}
  return Folder(
    id=_text(package, 'task.name') or path.name,
    instruction=instruction(path),
    image=image,
    dockerfile=dockerfile,
    workdir=_text(environment, 'environment.workdir'),
    memory_mib=_memory(environment),
    verifier_seconds=_seconds(verifier),
    env=_variables(environment, 'environment'),
    verifier_env=_variables(verifier, 'verifier'),
    solution_env=_variables(_section(told, 'solution'), 'solution'),
    context=parts['environment'],
    tests=parts['tests'],
    solution=parts['solution'],
  )


def _known(told: Mapping[str, Any]) -> None:
  """Refuses a setting that is not in the schema, with the nearest that is."""
  for section, names in _SECTIONS.items():
    known = names.split()
    for name in _section(told, section) if section else told:
      if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f'; is {near[0]} meant?' if near else ''
        raise Refused(f'{section}{"." if section else ""}{name}: not known{hint}')


def _section(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  found = told.get(name, {})
  if not isinstance(found, Mapping):
    raise Refused(f'{name}: got {type(found).__name__}, want a table')
  return found


def _refuse_general(told: Mapping[str, Any]) -> None:
  version = told.get('schema_version', told.get('version', '1.0'))
  if not re.fullmatch(r'1(\.\d+)*', str(version)):
    raise Refused(f'schema_version: got {version!r}, want 1.x')
  if told.get('steps'):
    raise Refused('steps: tasks of several steps do not run here')


def _refuse_environment(environment: Mapping[str, Any]) -> None:
  if str(environment.get('os', 'linux')).lower() != 'linux':
    raise Refused(f'environment.os: it wants {environment["os"]}')
  for name in ('gpus', 'gpu_types', 'tpu', 'mcp_servers', 'healthcheck', 'skills_dir'):
    if environment.get(name):
      raise Refused(
        f'environment.{name}: {environment[name]!r:.60} is not to be had here'
      )
  if environment.get('network_mode') == 'allowlist' or environment.get('allowed_hosts'):
    raise Refused('environment.allowed_hosts: no host is reachable from a sandbox')


def _refuse_verifier(verifier: Mapping[str, Any]) -> None:
  separate = verifier.get('environment_mode') == 'separate'
  if separate or verifier.get('environment') or verifier.get('collect'):
    raise Refused('verifier.environment: the verifier has an environment of its own')


def _text(told: Mapping[str, Any], name: str) -> str:
  value = told.get(name.rpartition('.')[2]) or ''
  if not isinstance(value, str):
    raise Refused(f'{name}: got {type(value).__name__}, want text')
  return value


def _variables(told: Mapping[str, Any], name: str) -> dict[str, str]:
  found = told.get('env', {})
  if not isinstance(found, Mapping):
    raise Refused(f'{name}.env: got {type(found).__name__}, want a table')
  for key, value in found.items():
    if not isinstance(value, str) or not re.fullmatch(r'[A-Za-z_]\w*', key):
      raise Refused(f'{name}.env.{key}: want a name and text')
    if '${' in value:
      raise Refused(f'{name}.env.{key}: it wants {value}, which is not passed in')
  return dict(found)


def _seconds(verifier: Mapping[str, Any]) -> float:
  value = verifier.get('timeout_sec', 600.0)
  if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
    raise Refused(f'verifier.timeout_sec: got {value!r}, want seconds')
  return float(value)


def _memory(environment: Mapping[str, Any]) -> int:
  value = environment.get('memory_mb', environment.get('memory', 0)) or 0
  if isinstance(value, str) and (size := _SIZE.fullmatch(value.strip())):
    value = int(float(size[1]) * _MIB[size[2].upper()])
  if isinstance(value, bool) or not isinstance(value, int) or value < 0:
    raise Refused(f'environment.memory_mb: got {value!r}, want MiB')
  return value


def files(path: pathlib.Path) -> dict[str, bytes]:
  """Files below a folder, {} if it is not there. Refused: links, too many bytes."""
  found: dict[str, bytes] = {}
  total = 0
  for file in sorted(path.rglob('*')) if path.is_dir() else ():
    name = file.relative_to(path).as_posix()
    if file.is_symlink():
      raise Refused(f'{path.name}/{name}: a link')
    if file.name == '.harborignore':
      raise Refused(f'{path.name}/{name}: its rules are not followed here')
    if file.is_file():
      total += file.stat().st_size
      if total > MAX_BYTES:
        raise Refused(f'{path.name}/: over {MAX_BYTES >> 20} MiB')
      found[name] = file.read_bytes()
  return found


def instruction(path: pathlib.Path) -> str:
  """What the agent is told, without the lines that mark benchmark data."""
  file = path / 'instruction.md'
  if not file.is_file():
    raise Refused('no instruction.md')
  lines = file.read_text(encoding='utf-8').split('\n')
  while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
    del lines[0]
  text = '\n'.join(lines).strip()
  if not text:
    raise Refused('instruction.md is empty')
  return text
