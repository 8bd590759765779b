"""Manifests: one JSON object per weight version, written last, created once.

  weights/manifest/{v:08d}.json             what version v is, and where
  weights/data/{v:08d}-{attempt}-{n}.bin    its frames, one after another, one or more

A version exists when its manifest does. It names its base, its codec, the object and
byte range of every block with the sha256 of what is stored and the xxh3-128 of the raw
bytes that result, a digest per tensor and one for the whole, the learner's step, and
*the plan* (plan.py): whatever samplers and rollouts must know. A checksum over all of
it stands in the file, so that no damaged manifest parses.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import re
from typing import Any

from swe17.store import kv
from swe17.sync import codec
from swe17.sync import plan as plans

SCHEMA = 1
MANIFESTS = 'weights/manifest/'
DATA = 'weights/data/'
CODINGS = ('full', 'xor', 'ulp', 'same')
_NAME = re.compile(r'weights/manifest/(\d{8})\.json')
_DATA_NAME = re.compile(r'weights/data/(\d{8})-.+\.bin')
_HEX = re.compile(r'[0-9a-f]+')


@dataclasses.dataclass(frozen=True)
class Object:
  """One stored object."""

  key: str
  size: int  # bytes


@dataclasses.dataclass(frozen=True)
class Block:
  """One block of a tensor: `start` to `stop` of an object, or nothing ('same')."""

  coding: str  # one of CODINGS
  object: int  # index into Manifest.objects
  start: int
  stop: int
  sha256: str  # of the stored range
  raw_hash: str  # xxh3-128 of the raw bytes that result


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor: its blocks lie in order, cut as `codec.blocks` cuts."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  digest: str
  blocks: tuple[Block, ...]

  @property
  def itemsize(self) -> int:
    return codec.DTYPES[self.dtype].itemsize

  @property
  def nbytes(self) -> int:
    size = self.itemsize
    for length in self.shape:
      size *= length
    return size


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What one version is."""

  version: int
  base: int | None  # None: a full snapshot
  base_digest: str  # digest of the base version; '' for a full snapshot
  codec: str
  step: int  # learner's optimiser step
  created: float  # Unix time [s]
  attempt: str  # of the publishing learner
  block_bytes: int
  objects: tuple[Object, ...]
  tensors: tuple[Tensor, ...]
  digest: str
  changed_share: float  # elements whose bits changed; 1 for a full snapshot
  plan: Mapping[str, Any]


def key_of(version: int) -> str:
  """The key of a version's manifest."""
  if not 0 <= version < 10**8:
    raise ValueError(f'weight version: got {version}, want 0 <= version < 10**8')
  return f'{MANIFESTS}{version:08d}.json'


def versions(store: kv.Store) -> list[int]:
  """Lists the versions that have a manifest, ascending."""
  names = (_NAME.fullmatch(key) for key in store.list(MANIFESTS))
  return [int(name.group(1)) for name in names if name]


def latest(store: kv.Store) -> int | None:
  """The newest version that has a manifest, or None."""
  return max(versions(store), default=None)


def data_version(key: str) -> int | None:
  """The version that a data object was written for, or None for another key."""
  name = _DATA_NAME.fullmatch(key)
  return int(name.group(1)) if name else None


def digest(tensors: Iterable[Tensor]) -> str:
  """A version's digest from its tensors' rows."""
  return codec.version_digest((t.name, t.dtype, t.shape, t.digest) for t in tensors)


def read(store: kv.Store, version: int) -> Manifest | None:
  """Reads one manifest; None if there is none. ValueError if it is damaged."""
  data = store.read(key_of(version))
  if data is None:
    return None
  manifest = parse(data)
  if manifest.version != version:
    raise ValueError(f'manifest {version}: says it is version {manifest.version}')
  return manifest


def to_bytes(manifest: Manifest) -> bytes:
  """A manifest as JSON with its checksum. ValueError if the plan is not JSON."""
  plans.check(manifest.plan)
  body = {'schema': SCHEMA, **vars(manifest)}
  body['objects'] = [vars(entry) for entry in manifest.objects]
  body['tensors'] = [
    {**vars(t), 'blocks': [list(vars(block).values()) for block in t.blocks]}
    for t in manifest.tensors
  ]
  try:
    # As it will be read: tuples are lists, keys are strings.
    body = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps({**body, 'checksum': _checksum(body)}).encode()
  except (TypeError, ValueError) as e:
    raise ValueError(f'manifest {manifest.version}: the plan is not JSON: {e}') from e


def parse(data: bytes) -> Manifest:
  """Inverse of `to_bytes`. ValueError, in one sentence, on anything else."""
  try:
    body = json.loads(data)
  except ValueError as e:
    raise ValueError(f'manifest is not JSON ({len(data)} bytes): {e}') from e
  if not isinstance(body, dict):
    raise ValueError(f'manifest: got a {type(body).__name__}, want an object')
  schema = body.pop('schema', None)
  if schema != SCHEMA:
    raise ValueError(f'manifest schema: got {schema!r}, this program reads {SCHEMA}')
  checksum = body.pop('checksum', None)
  if checksum != _checksum({'schema': schema, **body}):
    raise ValueError('manifest is damaged: its checksum does not match its content')
  want = {field.name for field in dataclasses.fields(Manifest)}
  if set(body) != want:
    missing, unknown = sorted(want - set(body)), sorted(set(body) - want)
    raise ValueError(f'manifest fields: {missing=} {unknown=}')
  try:
    body['objects'] = tuple(Object(**row) for row in body['objects'])
    body['tensors'] = tuple(_tensor(row) for row in body['tensors'])
    manifest = Manifest(**body)
    _check(manifest)
  except (TypeError, KeyError, AttributeError) as e:
    raise ValueError(f'manifest does not parse: {e!r}') from e
  return manifest


def _checksum(body: Mapping[str, Any]) -> str:
  text = json.dumps(body, sort_keys=True, separators=(',', ':'), allow_nan=False)
  return codec.stored_hash(text.encode())


def _tensor(row: dict[str, Any]) -> Tensor:
  fields: dict[str, Any] = dict(row)
  fields['shape'] = tuple(row['shape'])
  fields['blocks'] = tuple(Block(*block) for block in row['blocks'])
  return Tensor(**fields)


def _check(m: Manifest) -> None:
  """Raises ValueError unless a manifest is sound by itself."""
  names = [tensor.name for tensor in m.tensors]
  if not names or len(set(names)) != len(names):
    raise ValueError(f'manifest {m.version}: tensor names are absent or not unique')
  if m.base is None:
    sound = m.base_digest == ''
  else:
    sound = m.base == m.version - 1 and bool(_HEX.fullmatch(m.base_digest))
  if not sound:
    raise ValueError(
      f'manifest {m.version}: got base {m.base} ({m.base_digest!r}), want None or '
      f'{m.version - 1} with its digest'
    )
  for entry in m.objects:
    if data_version(kv.check_key(entry.key)) != m.version or entry.size < 0:
      raise ValueError(f'manifest {m.version}: object {entry} is not its own')
  if not isinstance(m.plan, dict):
    raise ValueError(f'manifest {m.version}: plan: got {m.plan!r}, want an object')
  plans.check(m.plan)
  for tensor in m.tensors:
    _check_tensor(m, tensor)
  if digest(m.tensors) != m.digest:
    raise ValueError(f'manifest {m.version}: its digest does not match its tensors')


def _check_tensor(m: Manifest, tensor: Tensor) -> None:
  at = f'manifest {m.version}: tensor {tensor.name!r}'
  if tensor.dtype not in codec.DTYPES or min(tensor.shape, default=0) < 0:
    raise ValueError(f'{at}: got {tensor.dtype} {tensor.shape}')
  cuts = codec.blocks(tensor.nbytes, tensor.itemsize, m.block_bytes)
  if len(cuts) != len(tensor.blocks):
    raise ValueError(f'{at}: got {len(tensor.blocks)} blocks, want {len(cuts)}')
  for block in tensor.blocks:
    if block.coding not in (('full',) if m.base is None else CODINGS):
      raise ValueError(f'{at}: coding {block.coding!r} with base {m.base}')
    if block.coding != 'same':
      size = (
        m.objects[block.object].size if block.object in range(len(m.objects)) else 0
      )
      if not 0 <= block.start < block.stop <= size:
        raise ValueError(f'{at}: range {block.start}:{block.stop} is not in its object')
  if codec.tensor_digest(b.raw_hash for b in tensor.blocks) != tensor.digest:
    raise ValueError(f'{at}: its digest does not match its blocks')
