"""Parameters on the host of process 0, as they are published.

On several processes each sends the shards that lie on its devices, leaf by leaf, and
process 0 puts them together: no device ever holds more than its shards, nothing goes to
a process that does not publish, and process 0 has the model in memory once. (What
`sync.publisher` keeps for the next delta is another copy.) To publish without that one
copy, every process would encode and store its own pieces (`sync/pieces.py` names them),
and process 0 would write a manifest over all their rows.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from swe17.learner import team as teams
from swe17.model import params as p
from swe17.sync import apply


def to_host(params: p.Params, team: teams.Team) -> dict[str, np.ndarray]:
  """{name: bfloat16 array} on process 0, {} on the others; a call for all of them.

  The copies are the host's own: `params` may be donated as soon as this returns.
  """
  if not team.several:
    return apply.to_host(params)
  host = {}
  for name, leaf in apply.name_tree(params).items():
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      leaf = leaf.astype(apply.PUBLISHED)
    if team.index == 0:
      host[name] = _whole(name, leaf, team)
    elif found := {str(s.device.id): np.asarray(s.data) for s in _shards(leaf, team)}:
      team.give(teams.Message('shards', {'leaf': name}, found))
  return host


def _shards(leaf: jax.Array, team: teams.Team) -> Iterator[jax.Shard]:
  """The shards of this process, each part of the leaf on one process only."""
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      yield shard


def _whole(name: str, leaf: jax.Array, team: teams.Team) -> np.ndarray:
  """A leaf from the shards of this process and of all that have some."""
  whole = np.empty(leaf.shape, leaf.dtype)
  for shard in _shards(leaf, team):
    whole[shard.index] = np.asarray(shard.data)
  by_process: dict[int, list[jax.Shard]] = {}
  for shard in leaf.global_shards:
    if shard.replica_id == 0 and shard.device.process_index != team.index:
      by_process.setdefault(shard.device.process_index, []).append(shard)
  for process, shards in by_process.items():
    message = team.take(process)
    assert (message.name, message.values) == ('shards', {'leaf': name}), message.name
    for shard in shards:
      whole[shard.index] = message.arrays[str(shard.device.id)]
  return whole
