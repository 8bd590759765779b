"""The reference policy of the KL penalty (`loss.kl_weight`): where RL starts from.

  begin -> keep: committed once, before version 0 is published
  resume -> load: the same values again, bit for bit

`loss.kl_reference='start'` is the policy of version 0. Its manifest cannot be relied
on: old full snapshots are deleted (`sync.keep_fulls`), and checkpoints are too. So a
copy is committed beside the checkpoints, in `<run_dir>/reference`, in the published
bfloat16 values: what the samplers drew the first group from, and half of float32. A
start that died before its first checkpoint starts over, and so does its reference.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from swe17 import config
from swe17.learner import checkpoint
from swe17.learner import state as st
from swe17.model import params as p

_KEEP = config.Checkpoint(every=1, keep=1)


def _folder(run_dir: str) -> checkpoint.Checkpoints:
  return checkpoint.Checkpoints(os.path.join(run_dir, 'reference'), _KEEP)


def _held(params: p.Params) -> p.Params:
  """A copy as it is published and held: bfloat16, split like `params`."""
  # A copy also of what is bfloat16 already: the parameters are donated by every step.
  return jax.tree.map(lambda w: jnp.array(w, jnp.bfloat16, copy=True), params)


def _state(params: p.Params) -> st.State:
  # The count is numpy's: no array of one process's device is written by several.
  step: Any = np.zeros((), np.int32)
  return st.State(params, optax.EmptyState(), step)


def keep(run_dir: str, params: p.Params) -> p.Params:
  """Commits the reference to disk, in place of any earlier one, and returns it."""
  held, folder = _held(params), _folder(run_dir)
  try:
    newest = folder.latest()
    folder.save(0 if newest is None else newest + 1, _state(held), {})
  finally:
    folder.close()
  return held


def load(run_dir: str, like: p.Params) -> p.Params:
  """The reference that `keep` committed, split like `like`.

  Raises:
    ValueError: there is none.
  """
  folder = _folder(run_dir)
  try:
    found, _ = folder.restore(_state(_held(like)))
  except FileNotFoundError as e:
    raise ValueError(
      f'loss.kl_weight: no reference in {run_dir}/reference: it is written when a run '
      'starts; bring the folder back, or start a new run'
    ) from e
  finally:
    folder.close()
  return found.params
