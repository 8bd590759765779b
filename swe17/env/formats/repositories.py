"""A repository's files at one commit, without its history.

  clone, bare clone, bundle, or a plain folder  ->  Snapshot, files in memory

Blobs are read as they are stored: no attribute, filter or hook of the repository has a
say in what they become. Nothing of `.git` is in a snapshot, so no later commit is
within reach of whoever works on it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import dataclasses
import functools
import io
import os
import pathlib
import re
import stat
import subprocess
import tarfile
import tempfile

MAX_BYTES = 256 << 20  # of a snapshot
_SECONDS = 300.0  # of one call of git
_COMMIT = re.compile(r'[0-9a-f]{7,64}')
_LINK, _MODULE, _EXECUTABLE = '120000', '160000', '100755'


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Files by relative path, '/' between names. Submodules are left out."""

  files: Mapping[str, bytes]
  links: Mapping[str, str]  # path -> target, as it is written
  executable: frozenset[str]

  @functools.cached_property
  def tar(self) -> bytes:
    """The same as a tar file, the first state of an agent's folder."""
    return pack(self.files, self.links, self.executable)


def pack(
  files: Mapping[str, bytes],
  links: Mapping[str, str] | None = None,
  executable: Collection[str] = (),
  folders: Iterable[str] = (),
) -> bytes:
  """A tar file of files, links, and folders that are to be there though empty."""
  made = io.BytesIO()
  with tarfile.open(fileobj=made, mode='w') as tar:
    for name in folders:
      member = tarfile.TarInfo(name)
      member.type, member.mode = tarfile.DIRTYPE, 0o755
      tar.addfile(member)
    for name, data in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(data)
      member.mode = 0o755 if name in executable else 0o644
      tar.addfile(member, io.BytesIO(data))
    for name, target in (links or {}).items():
      member = tarfile.TarInfo(name)
      member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
      tar.addfile(member)
  return made.getvalue()


def files_of(folder: bytes) -> dict[str, bytes]:
  """Plain files of a tar file, by path. ValueError if it is none."""
  found = {}
  try:
    with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
      for member in tar:
        if member.isreg():
          file = tar.extractfile(member)
          assert file is not None
          found[os.path.normpath(member.name)] = file.read()
  except tarfile.TarError as e:
    raise ValueError(f'folder: not a tar file: {e}') from e
  return found


def find(root: pathlib.Path, repo: str, instance: str) -> pathlib.Path | None:
  """Where below `root` an instance's repository is; None if it is nowhere.

  Looked for are a folder or a `.bundle` named by the instance, `owner__name`, or
  `name`, in this order.
  """
  for name in (instance, repo.replace('/', '__'), repo.rpartition('/')[2]):
    for place in (root / name, root / f'{name}.git', root / f'{name}.bundle'):
      if place.exists():
        return place
  return None


@functools.lru_cache(maxsize=8)
def snapshot(place: str, commit: str) -> Snapshot:
  """The files at `commit` of a clone or bundle; all of a folder that is neither.

  ValueError says what is missing: the commit, git itself, or the place.
  """
  path = pathlib.Path(place)
  if not _COMMIT.fullmatch(commit):
    raise ValueError(f'base_commit: got {commit!r}, want a hash')
  if path.suffix == '.bundle' and path.is_file():
    with tempfile.TemporaryDirectory(prefix='bundle-') as scratch:
      clone = ['clone', '--quiet', '--bare', '--no-hardlinks', str(path), scratch]
      _git(None, *clone)
      return _of_git(pathlib.Path(scratch), commit)
  for git_dir in (path / '.git', path):
    if (git_dir / 'objects').is_dir() and (git_dir / 'HEAD').is_file():
      return _of_git(git_dir, commit)
  if path.is_dir() and not (path / '.git').exists():
    return _of_folder(path)
  raise ValueError(f'{place}: want a clone, a .bundle, or a folder without .git')


def _git(git_dir: pathlib.Path | None, *words: str, given: bytes = b'') -> bytes:
  """Runs git without anybody's settings or hooks; its output."""
  command = ['git', '-c', 'core.hooksPath=/dev/null', '-c', 'core.fsmonitor=false']
  if git_dir is not None:
    command += ['--git-dir', str(git_dir)]
  env = {name: os.environ[name] for name in ('PATH', 'TMPDIR') if name in os.environ}
  env |= {'GIT_CONFIG_NOSYSTEM': '1', 'GIT_CONFIG_GLOBAL': os.devnull}
  env |= {'GIT_TERMINAL_PROMPT': '0', 'LC_ALL': 'C.UTF-8'}
  # Who owns a clone that the settings name is for the person to judge.
  env |= {'GIT_CONFIG_COUNT': '1', 'GIT_CONFIG_KEY_0': 'safe.directory'}
  env |= {'GIT_CONFIG_VALUE_0': '*', 'GIT_NO_LAZY_FETCH': '1'}
  try:
    done = subprocess.run(
      [*command, *words],
      check=False,
      input=given,
      capture_output=True,
      env=env,
      timeout=_SECONDS,
    )
  except FileNotFoundError as e:
    raise ValueError('git is not installed: repositories cannot be read') from e
  except subprocess.TimeoutExpired as e:
    raise ValueError(f'git {words[0]} took over {_SECONDS:g} s') from e
  if done.returncode != 0:
    lines = done.stderr.decode(errors='replace').strip().splitlines()
    raise ValueError(f'git {words[0]}: {(lines or ["without a word"])[-1]}')
  return done.stdout


def _of_git(git_dir: pathlib.Path, commit: str) -> Snapshot:
  try:
    listed = _git(git_dir, 'ls-tree', '-r', '-z', '--full-tree', '--long', commit)
  except ValueError as e:
    raise ValueError(f'commit {commit[:12]} is not there ({e})') from e
  entries = []
  total = 0
  for line in filter(None, listed.split(b'\0')):
    meta, _, name = line.partition(b'\t')
    mode, _, blob, size = meta.decode().split()
    if mode == _MODULE:
      continue
    total += int(size)
    entries.append((os.fsdecode(name), mode, blob))
  if total > MAX_BYTES:
    raise ValueError(f'the tree has {total >> 20} MiB, want at most {MAX_BYTES >> 20}')
  blobs = ''.join(f'{blob}\n' for _, _, blob in entries).encode()
  batch = _git(git_dir, 'cat-file', '--batch', given=blobs)
  contents = list(_contents(batch, len(entries)))
  files = {}
  links = {}
  for (name, mode, _), data in zip(entries, contents, strict=True):
    if mode == _LINK:
      links[name] = os.fsdecode(data)
    else:
      files[name] = data
  executable = frozenset(name for name, mode, _ in entries if mode == _EXECUTABLE)
  return Snapshot(files, links, executable)


def _contents(batch: bytes, count: int) -> Iterator[bytes]:
  """What `cat-file --batch` says: a line with the size, the bytes, a line's end."""
  at = 0
  for _ in range(count):
    end = batch.index(b'\n', at)
    words = batch[at:end].split()
    if len(words) != 3:
      raise ValueError(f'git cat-file: {batch[at:end].decode(errors="replace")}')
    size = int(words[2])
    yield batch[end + 1 : end + 1 + size]
    at = end + size + 2


def _of_folder(path: pathlib.Path) -> Snapshot:
  files: dict[str, bytes] = {}
  links: dict[str, str] = {}
  executable = set()
  total = 0
  for at, folders, names in os.walk(path):
    folders[:] = sorted(f for f in folders if f not in ('.git', '__pycache__'))
    here = pathlib.Path(at)
    for name in sorted([*names, *(f for f in folders if (here / f).is_symlink())]):
      file = here / name
      relative = file.relative_to(path).as_posix()
      status = file.lstat()
      if stat.S_ISLNK(status.st_mode):
        links[relative] = os.readlink(file)
      elif stat.S_ISREG(status.st_mode) and file.suffix not in ('.pyc', '.pyo'):
        total += status.st_size
        if total > MAX_BYTES:
          raise ValueError(f'{path}: over {MAX_BYTES >> 20} MiB')
        files[relative] = file.read_bytes()
        if status.st_mode & 0o100:
          executable.add(relative)
  return Snapshot(files, links, frozenset(executable))
