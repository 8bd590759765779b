"""Dockerfiles so plain that no image is needed: a base, files, a place to work at.

Read are FROM (a common base without what is special about it), WORKDIR, COPY and ENV;
whatever runs at a build, or comes from elsewhere, is refused with its line. Whether a
task then works on this machine's own programs is shown by its solution, not assumed.

Source: the Dockerfile reference of docker 28.
"""

from collections.abc import Mapping
import dataclasses
import json
import posixpath
import re
import shlex

_BASES = re.compile(
  r'(?:docker\.io/|library/)*(python|debian|ubuntu|buildpack-deps)(:\S+)?'
)
_IGNORED = ('LABEL', 'CMD', 'ENTRYPOINT', 'EXPOSE', 'MAINTAINER', 'STOPSIGNAL')


class NotPlain(ValueError):
  """A Dockerfile asks for more than files."""


@dataclasses.dataclass(frozen=True)
class Plain:
  """What a plain Dockerfile leaves: absolute path -> bytes, and how commands start."""

  files: Mapping[str, bytes]
  folders: tuple[str, ...]
  env: Mapping[str, str]
  workdir: str


def lines(text: str) -> list[str]:
  """Instructions, a line each: comments gone, continued lines joined."""
  found: list[str] = []
  held = ''
  for line in text.splitlines():
    if line.lstrip().startswith('#') or (not held and not line.strip()):
      continue
    held += line.rstrip()
    if held.endswith('\\'):
      held = held[:-1] + ' '
      continue
    found.append(held.strip())
    held = ''
  return [*found, held.strip()] if held.strip() else found


def read(text: str, context: Mapping[str, bytes]) -> Plain:
  """What a Dockerfile makes of the files of its folder. NotPlain names the line."""
  files: dict[str, bytes] = {}
  env: dict[str, str] = {}
  folders: list[str] = []
  workdir, based = '/', False
  if '.dockerignore' in context:
    raise NotPlain('Dockerfile: a .dockerignore, whose rules are not followed here')
  for line in lines(text):
    word, _, rest = line.partition(' ')
    rest = rest.strip()
    match word.upper():
      case 'FROM' if not based and _BASES.fullmatch(rest):
        based = True
      case 'WORKDIR' if '$' not in rest:
        workdir = posixpath.normpath(posixpath.join(workdir, rest))
        folders.append(workdir)
      case 'COPY':
        files |= _copied(line, _words(rest), context, workdir)
      case 'ENV':
        env |= _variables(line, rest)
      case ignored if ignored in _IGNORED:
        continue
      case _:
        raise NotPlain(f'Dockerfile: {line[:80]!r} needs an image to be built')
  if not based:
    raise NotPlain('Dockerfile: no FROM')
  return Plain(files, tuple(folders), env, workdir)


def _words(rest: str) -> list[str]:
  if rest.startswith('['):
    try:
      return [str(word) for word in json.loads(rest)]
    except json.JSONDecodeError:
      return []
  return rest.split()


def _copied(
  line: str, words: list[str], context: Mapping[str, bytes], workdir: str
) -> dict[str, bytes]:
  """The files of one COPY, by their absolute paths."""
  *sources, target = words or ['']
  plain = not any(set('*?[$<') & set(word) or word.startswith('--') for word in words)
  if not sources or not plain:
    raise NotPlain(f'Dockerfile: {line[:80]!r} copies more than files by their names')
  into = target.endswith('/') or target == '.' or len(sources) > 1
  place = posixpath.normpath(posixpath.join(workdir, target))
  found = {}
  for source in sources:
    name = posixpath.normpath(source.lstrip('/') or '.')
    if name in context:
      to = posixpath.join(place, posixpath.basename(name)) if into else place
      found[to] = context[name]
      continue
    start = '' if name == '.' else f'{name}/'
    below = {path: data for path, data in context.items() if path.startswith(start)}
    if not below:
      raise NotPlain(f'Dockerfile: {line[:80]!r}: no {source} in environment/')
    for path, data in below.items():  # a folder's contents, never itself
      found[posixpath.join(place, path[len(start) :])] = data
  return found


def _variables(line: str, rest: str) -> dict[str, str]:
  try:
    words = shlex.split(rest)
  except ValueError as e:
    raise NotPlain(f'Dockerfile: {line[:80]!r}: {e}') from e
  if words and '=' not in words[0]:  # the older form, one variable a line
    words = [f'{words[0]}={" ".join(words[1:])}']
  found = {name: value for name, _, value in (w.partition('=') for w in words)}
  if any('$' in value for value in found.values()):
    raise NotPlain(f'Dockerfile: {line[:80]!r} depends on its base')
  return found
