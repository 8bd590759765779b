"""The tensors of a Hugging Face folder or a GGUF file, read box by box. Without JAX.

A folder holds config.json and either model.safetensors or shards with an index. Files
are mapped into memory, so that only what is asked for is read.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

INDEX, SINGLE = 'model.safetensors.index.json', 'model.safetensors'
FLOATS = {  # as files call them: all are read into float32, which is exact
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Tensors:
  """What a file holds.

  Attributes:
    shapes: of every tensor by its name.
    dtypes: as the file calls them.
    readable: those of them that `read` understands.
    read: (name, slices, one a dimension) -> float32 values.
  """

  shapes: dict[str, tuple[int, ...]]
  dtypes: dict[str, str]
  readable: frozenset[str]
  read: Callable[[str, tuple[slice, ...]], np.ndarray]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object. ValueError if it is none, or says one thing twice."""
  if not path.is_file():
    raise FileNotFoundError(f'{path.parent} has no {path.name}')
  return _parse(path.read_bytes(), str(path))


def open_folder(folder: pathlib.Path) -> Tensors:
  """The tensors of all shards.

  ValueError names a tensor that stands twice, or where the index does not say.
  """
  paths, index = _shards(folder)
  home: dict[str, pathlib.Path] = {}
  shapes, dtypes = {}, {}
  for path in paths:
    for name, entry in _header(path).items():
      if name in home:
        raise ValueError(f'{name} stands twice: in {home[name].name} and {path.name}')
      home[name] = path
      shapes[name], dtypes[name] = tuple(entry['shape']), entry['dtype']
  if index is not None:
    said = {name: folder / file for name, file in index.items()}
    wrong = sorted(n for n in said.keys() | home.keys() if said.get(n) != home.get(n))
    if wrong:
      raise ValueError(f'{folder / INDEX} is wrong about the place of {named(wrong)}')

  opened = functools.cache(_opened)

  def read(name: str, box: tuple[slice, ...]) -> np.ndarray:
    return np.asarray(opened(home[name]).get_slice(name)[box], np.float32)

  return Tensors(shapes, dtypes, frozenset(FLOATS), read)


def named(names: Iterable[str], most: int = 5) -> str:
  """The first of a list of names, and how many follow."""
  all_names = list(names)
  more = f' and {len(all_names) - most} more' if len(all_names) > most else ''
  return ', '.join(all_names[:most]) + more


def _opened(path: pathlib.Path) -> Any:
  try:
    import safetensors
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError('to read safetensors: pip install "swe17[hf]"') from e
  return safetensors.safe_open(path, 'np')


def _shards(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str] | None]:
  """(shards, {tensor: shard}); no index where there is one file."""
  if (folder / INDEX).is_file():
    index = read_json(folder / INDEX)['weight_map']
    paths = [folder / name for name in sorted(set(index.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
      raise FileNotFoundError(f'{folder} lacks {named(missing)}')
    return paths, index
  if (folder / SINGLE).is_file():
    return [folder / SINGLE], None
  raise FileNotFoundError(f'{folder} has neither {SINGLE} nor {INDEX}')


def _header(path: pathlib.Path) -> dict[str, Any]:
  """Names, dtypes and shapes. Read here because libraries keep the last of two."""
  with path.open('rb') as file:
    size = int.from_bytes(file.read(8), 'little')
    if size > path.stat().st_size:
      raise ValueError(f'{path} is no safetensors file, or was cut off')
    header = _parse(file.read(size), str(path))
  header.pop('__metadata__', None)
  return header


def _parse(data: bytes, what: str) -> dict[str, Any]:
  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      names = [name for name, _ in pairs]
      twice = sorted({name for name in names if names.count(name) > 1})
      raise ValueError(f'{what}: {named(twice)} stands twice')
    return found

  try:
    found = json.loads(data, object_pairs_hook=once)
  except (json.JSONDecodeError, UnicodeDecodeError) as e:
    raise ValueError(f'{what} is not JSON: {e}') from e
  if not isinstance(found, dict):
    raise ValueError(f'{what}: got {type(found).__name__}, want a JSON object')
  return found
