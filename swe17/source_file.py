"""Where `model.source` lies: a folder, a .gguf file, or a package that holds one.

`pip:name` is an installed package with one .gguf file in it; it is found, not imported.
"""

import importlib.util
import pathlib


def resolve(source: str) -> pathlib.Path:
  """The folder or .gguf file. FileNotFoundError if there is none."""
  if not source.startswith('pip:'):
    path = pathlib.Path(source).expanduser().absolute()
    if not path.exists():
      raise FileNotFoundError(f'model.source: nothing at {path}')
    return path
  package = source.removeprefix('pip:')
  spec = importlib.util.find_spec(package)
  if spec is None or spec.origin is None:
    raise FileNotFoundError(f'model.source: {package} is not installed')
  found = sorted(pathlib.Path(spec.origin).parent.glob('*.gguf'))
  if len(found) != 1:
    raise FileNotFoundError(f'model.source: {package} has {len(found)} .gguf, want 1')
  return found[0]
