"""From a config file and flags to a checked `config.Config`, and to config.json.

A config file starts from `default()` and changes what it wants; flags change the
result; `resolve` turns it into a `Config` once. The run folder's config.json is
`to_json`: every leaf with its value, where the value came from, and its meaning.
"""

from collections.abc import Collection, Mapping
import dataclasses
import difflib
import json
import math
import pathlib
from typing import Any

import ml_collections

from swe17 import config

# What a config file hands over: nested settings.
Values = Mapping[str, Any] | ml_collections.ConfigDict

# What a resumed run may change: how it runs, not what it computes.
CHANGEABLE = frozenset({
  'run_dir', 'store', 'steps', 'tasks.verify', 'sandbox.backend', 'sandbox.workers',
  'sampler.processes', 'sampler.threads', 'sampler.poll_seconds', 'rollout.retries',
  'rollout.keep_episodes', 'checkpoint.every', 'checkpoint.keep', 'sync.full_every',
  'sync.codec', 'sync.object_bytes', 'sync.threads', 'sync.keep_fulls',
  'sync.keep_most', 'sync.ack_seconds', 'sync.restore_seconds',
  'sync.verify_device', 'relay.enabled', 'relay.cluster', 'relay.fanout',
  'relay.samplers_per_node', 'relay.nodes', 'relay.host', 'relay.cache_bytes',
  'relay.poll_seconds', 'relay.wait_seconds', 'relay.stall_seconds',
  'relay.bucket_last',
  'mesh.replica', 'mesh.fsdp', 'mesh.expert', 'mesh.context', 'mesh.tensor',
  'mesh.processes', 'mesh.coordinator', 'mesh.heartbeat_seconds',
})  # fmt: skip


def leaves(cls: Any = config.Config, at: str = '') -> dict[str, dataclasses.Field]:
  """Every setting by its dotted name, in the order of the file."""
  found = {}
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      found.update(leaves(field.type, f'{at}{field.name}.'))
    else:
      found[at + field.name] = field
  return found


def default() -> ml_collections.ConfigDict:
  """The defaults as the ConfigDict that a config file edits."""
  return ml_collections.ConfigDict(dataclasses.asdict(config.Config()))


def flatten(values: Values | config.Config, at: str = '') -> dict[str, Any]:
  """Nested settings (a mapping or a `Config`) as {dotted name: value}."""
  if isinstance(values, config.Config):
    values = dataclasses.asdict(values)
  flat: dict[str, Any] = {}
  for name, value in values.items():
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      flat.update(flatten(value, f'{at}{name}.'))
    else:
      flat[at + name] = value
  return flat


def nearest(name: str) -> str:
  """The setting whose name, or first words of meaning, is closest to `name`."""
  name = name.lower()
  leaf = name.rpartition('.')[2]

  def likeness(item: tuple[str, dataclasses.Field]) -> float:
    full, field = item
    meaning = field.metadata['doc'].lower()[: len(leaf)]
    pairs = ((name, full), (leaf, field.name), (leaf.replace('_', ' '), meaning))
    ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs]
    # Of equal leaves (loss.steps, imitation.steps) the one of the same section.
    return max(ratios) + 0.1 * ratios[0]

  return max(leaves().items(), key=likeness)[0]


def resolve(values: Values) -> config.Config:
  """Nested settings as a checked `Config`; what is absent keeps its default.

  ValueError names the setting: unknown (with the nearest name), of the wrong type
  ('false' is no bool, True no int, 1 a float), out of range or contradictory.
  """
  return _build(config.Config, values, '')


def _build(cls: Any, values: Values, at: str) -> Any:
  fields = {field.name: field for field in dataclasses.fields(cls)}
  kwargs = {}
  for name, value in values.items():
    full = f'{at}{name}'
    if name not in fields:
      raise ValueError(f'unknown setting {full}; the nearest is {nearest(full)}')
    kind: Any = fields[name].type
    if not dataclasses.is_dataclass(kind):
      kwargs[name] = _checked(full, kind, value)
    elif isinstance(value, Mapping | ml_collections.ConfigDict):
      kwargs[name] = _build(kind, value, full + '.')
    else:
      raise ValueError(f'{full}: got {value!r}, want a section of settings')
  return cls(**kwargs)


def _checked(name: str, kind: type, value: Any) -> Any:
  if kind is float and type(value) is int:
    value = float(value)
  want = {bool: 'True or False', int: 'an integer', float: 'a number', str: 'a string'}
  if type(value) is not kind:
    raise ValueError(f'{name}: got {value!r}, want {want[kind]}')
  if kind is float and not math.isfinite(value):
    raise ValueError(f'{name}: got {value!r}, want a finite number')
  return value


def origins(loaded: Values, flags: Collection[str]) -> dict[str, str]:
  """Where each leaf's value came from: 'flag', 'file' or 'default'.

  What `model.source` gave is named 'source' by who reads it.

  loaded: the nested settings as the config file returned them, before flags.
  flags: dotted names that flags set.
  """
  of_file, of_default = flatten(loaded), flatten(config.Config())
  return {
    name: 'flag' if name in flags
    else 'file' if of_file.get(name, value) != value
    else 'default'
    for name, value in of_default.items()
  }  # fmt: skip


def to_json(cfg: config.Config, origin: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """{'optim.lr': {'value': .., 'origin': .., 'doc': ..}, ..}: a run's config.json."""
  fields = leaves()
  return {
    name: {'value': value, 'origin': origin[name], 'doc': fields[name].metadata['doc']}
    for name, value in flatten(cfg).items()
  }


def from_json(document: Mapping[str, Mapping[str, Any]]) -> config.Config:
  """Inverse of `to_json`. ValueError as `resolve`."""
  nested: dict[str, Any] = {}
  for name, leaf in document.items():
    *sections, last = name.split('.')
    at = nested
    for section in sections:
      at = at.setdefault(section, {})
    at[last] = leaf['value']
  return resolve(nested)


def load(run_dir: str) -> config.Config:
  """The settings of the run in `run_dir`, with its paths as they are now.

  The folder may have moved since; `store`, if empty, becomes the one inside it.

  FileNotFoundError without a config.json, ValueError if it is not one of ours.
  """
  path = pathlib.Path(run_dir).absolute() / 'config.json'
  try:
    cfg = from_json(json.loads(path.read_text()))
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(f'{path} does not hold the settings of a run: {e}') from e
  store = cfg.store or f'file://{path.parent}/store'
  return dataclasses.replace(cfg, run_dir=str(path.parent), store=store)
