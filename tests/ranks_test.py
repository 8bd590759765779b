"""Who may import whom, read off the source and tried with JAX blocked.

A file imports its own package or one of a strictly lower rank. With that, and with
every package's own third parties checked, no import cycle and no hidden use of JAX is
possible; the last test proves the second by importing all of it where JAX is missing.
"""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

RANK = {
  'swe17.types': 0, 'swe17.config': 0, 'swe17.settings': 0, 'swe17.wire': 0,
  'swe17.fields': 0, 'swe17.config_env': 0, 'swe17.config_loss': 0,
  'swe17.config_model': 0,
  'swe17.kept': 0, 'swe17.wire_kept': 0, 'swe17.source_file': 0,
  'swe17.ops': 1, 'swe17.store': 1, 'swe17.env': 1, 'swe17.metrics': 1,
  'swe17.model': 2, 'swe17.agent': 2, 'swe17.sync': 2,
  'swe17.api': 3,
  'swe17.learner': 4, 'swe17.sampler': 4, 'swe17.rollout': 4,
  'launch': 5,
  'experiments': 6,
}  # fmt: skip

# In rank 0 there are files, not packages; they may use each other in this order.
RANK_0 = ['swe17.types', 'swe17.fields']
RANK_0 += ['swe17.config_env', 'swe17.config_loss', 'swe17.config_model']
RANK_0 += ['swe17.config', 'swe17.settings']
RANK_0 += ['swe17.kept', 'swe17.wire_kept', 'swe17.wire', 'swe17.source_file']

JAX = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'}
JAX_PACKAGES = {'swe17.ops', 'swe17.model', 'swe17.learner', 'swe17.sampler'}
# Numpy files among packages with JAX, and the one file with JAX among those without.
WITHOUT_JAX = {'swe17.ops', 'swe17.ops.advantage', 'swe17.ops.length', 'swe17.model'}
WITHOUT_JAX |= {
  f'swe17.model.{file}'
  for file in (
    'hf_config',
    'hf_config_write',
    'hf_files',
    'gguf_file',
    'names',
    'source',
  )
}
WITH_JAX = {'swe17.sync.apply'}

# Third party -> the modules (or packages) that may import it.
ONLY = {
  'orbax': ('swe17.learner.checkpoint',),
  'tensorstore': ('swe17.store',),
  'google.cloud': ('swe17.store',),
  'absl.flags': ('launch', 'experiments'),
  'absl.app': ('launch', 'experiments'),
  'ml_collections.config_flags': ('launch', 'experiments'),
}
SETTERS = ('launch', 'experiments')  # of JAX's configuration


def modules() -> dict[str, pathlib.Path]:
  """Every module of ours by its dotted name; a package by its `__init__`."""
  found = {}
  for top in ('swe17', 'launch', 'experiments'):
    for path in sorted((ROOT / top).rglob('*.py')):
      parts = path.relative_to(ROOT).with_suffix('').parts
      found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
  return found


MODULES = modules()


def imported(tree: ast.AST) -> set[str]:
  """Dotted names that a file imports, wherever in it, `from a import b` as `a.b`.

  `importlib.import_module('x')` with the name written out counts too.
  """
  found: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'line {node.lineno}: relative import'
      found.update(f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
      'import_module'
    ):
      first = node.args[0]
      if isinstance(first, ast.Constant) and isinstance(first.value, str):
        found.add(first.value)
  return found


IMPORTS = {name: imported(ast.parse(p.read_text())) for name, p in MODULES.items()}


def within(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(prefix + '.')


def package(name: str) -> str | None:
  """The row of `RANK` that a dotted name of ours belongs to."""
  return next((row for row in RANK if within(name, row)), None)


def ours(name: str) -> str | None:
  """The module of ours behind a name (`swe17.types.Task` -> `swe17.types`)."""
  while name:
    if name in MODULES:
      return name
    name = name.rpartition('.')[0]
  return None


def needs_jax(name: str) -> bool:
  if name in WITHOUT_JAX or name in WITH_JAX:
    return name in WITH_JAX
  return package(name) in JAX_PACKAGES


@functools.cache
def at_import(name: str) -> frozenset[str]:
  """What a file imports when it is imported; the bodies of functions run later."""
  tree = ast.parse(MODULES[name].read_text())
  for function in ast.walk(tree):
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
      function.body = [ast.Pass()]
  return frozenset(imported(tree))


def reached(name: str) -> set[str]:
  """Modules of ours that importing `name` brings in, itself and packages included."""
  found, left = set(), [name]
  while left:
    at = left.pop()
    if at in found:
      continue
    found.add(at)
    if '.' in at:
      left.append(at.rpartition('.')[0])
    left += [m for m in map(ours, at_import(at)) if m]
  return found


# Benches and tools may use JAX; the program that starts the roles may not.
FREE = [m for m in MODULES if not needs_jax(m) and package(m) != 'experiments']
FREE += ['experiments.swe17', 'experiments.options', 'experiments.configs.quickstart']


def test_every_module_has_a_rank():
  for name in MODULES:
    assert name == 'swe17' or package(name), f'{name}: give it a row in RANK'


@pytest.mark.parametrize('name', [m for m in MODULES if m != 'swe17'])
def test_a_file_imports_its_own_package_or_a_lower_rank(name):
  mine = package(name)
  for target in IMPORTS[name]:
    if not target.startswith(('swe17', 'launch', 'experiments')):
      continue
    assert ours(target), f'{name} imports {target}, which does not exist'
    theirs = package(target)
    assert theirs, f'{name} imports {target}: import a module of it'
    if mine == theirs:
      continue
    if mine in RANK_0 and theirs in RANK_0:
      assert RANK_0.index(theirs) < RANK_0.index(mine), f'{name} imports {target}'
    else:
      assert RANK[theirs] < RANK[mine], (
        f'{name} (rank {RANK[mine]}) imports {target} (rank {RANK[theirs]})'
      )


@pytest.mark.parametrize('third', ONLY)
def test_a_third_party_is_imported_where_it_belongs(third):
  for name in MODULES:
    if any(within(name, allowed) for allowed in ONLY[third]):
      continue
    for target in IMPORTS[name]:
      assert not within(target, third), f'{name} imports {target}'


@pytest.mark.parametrize('name', FREE)
def test_a_file_without_jax_reaches_none(name):
  for module in reached(name):
    targets = IMPORTS[module] if module == name else ()
    found = {t for t in targets if t.partition('.')[0] in JAX}
    assert not found, f'{name} imports {found}'
    assert not needs_jax(module), f'{name} reaches {module}, which needs JAX'


def test_only_the_wiring_sets_jax_configuration():
  for name, path in MODULES.items():
    if package(name) in SETTERS:
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call):
        call = ast.unparse(node.func)
        assert not call.startswith('jax.config.'), f'{name} line {node.lineno}: {call}'
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
        assert not text.startswith(('JAX_', 'XLA_', '--xla')), f'{name}: {text}'


def test_packages_without_jax_import_where_it_is_missing():
  code = f"""
import importlib, sys

blocked = set({sorted(JAX)!r})

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in blocked:
      raise ModuleNotFoundError(f'{{name}} is blocked', name=name)

sys.meta_path.insert(0, Missing())
for name in {FREE!r}:
  importlib.import_module(name)
assert not blocked & sys.modules.keys()
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_the_blocked_interpreter_does_block():
  """The control of the test above: a file with JAX fails in the same way."""
  code = """
import sys
sys.modules['jax'] = None
import swe17.model.params
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode != 0 and 'jax' in done.stderr
