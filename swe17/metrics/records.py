"""What a run records: one JSON row a learner step, and events on their own clocks.

`metrics.jsonl` holds one row a learner step. Steps rise by one and never repeat. Each
row has every key of `METRICS`; null says "not measured" and is never a zero. A mean
stands beside a count of the values it is over (`Metric.count`), NaN and infinity are
refused. Other processes (samplers, rollout) do not share the learner's clock: they
write one-line JSON events `{"time": ..., "kind": ..., ...}` to files of their own.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import logging
import math
import numbers
import os
import time
from typing import Any

import numpy as np

from swe17.metrics import board, lines

FILE = 'metrics.jsonl'

_VALID = 'solve_rate_count'
_TOKENS = 'token_count'


@dataclasses.dataclass(frozen=True)
class Metric:
  """One column. A mean names in `count` the column with its number of values."""

  name: str
  unit: str
  doc: str
  group: str
  count: str = ''


_m = Metric
METRICS: tuple[Metric, ...] = (
  _m('step', 'steps', 'learner steps done, this one included', 'run'),
  _m('version', '', 'newest weight version published after the step', 'run'),
  _m('time', 's', 'wall time since the run started', 'run'),
  _m('episodes', 'episodes', "episodes of the step's groups, invalid included", 'run'),
  _m('groups_trained', 'groups', 'groups with a training signal', 'run'),
  _m('groups_no_signal', 'groups', 'groups whose advantages are all zero', 'run'),
  _m('groups_degenerate', 'groups', 'no signal but shaping, not all solved', 'run'),
  _m('groups_dropped', 'groups', 'groups dropped since the last row', 'run'),
  _m('token_count', 'tokens', 'sampled tokens that token means are over', 'run'),
  _m('solve_rate', 'share', 'valid episodes that solved', 'outcome', _VALID),
  _m('solve_rate_count', 'episodes', "the step's valid episodes", 'outcome'),
  _m('invalid_share', 'share', 'spoiled by infrastructure', 'outcome', 'episodes'),
  _m('malformed_share', 'share', 'episodes with a bad call', 'outcome', _VALID),
  _m('cheating_share', 'share', 'with signs of cheating', 'outcome', _VALID),
  _m('submitted_share', 'share', 'ended by their own submit', 'outcome', _VALID),
  _m('cut_share', 'share', 'cut at a length or turn limit', 'outcome', _VALID),
  _m('reward', '', 'shaped reward of a valid episode', 'outcome', 'reward_count'),
  _m('reward_count', 'episodes', 'in groups of 2 valid or more', 'outcome'),
  _m('over_budget_share', 'share', 'penalised by length', 'outcome', 'reward_count'),
  _m('masked_share', 'share', 'outside of the loss', 'outcome', 'masked_count'),
  _m('masked_count', 'episodes', 'valid ones of groups that train', 'outcome'),
  _m('entropy', 'nats', 'whole vocabulary, at the sampler', 'policy', _TOKENS),
  _m('kept_entropy', 'nats', 'over the kept set, at the learner', 'policy', _TOKENS),
  _m('kept_size_mean', 'ids', 'size of the kept set', 'policy', _TOKENS),
  _m('singleton_share', 'share', 'tokens with a kept set of one', 'policy', _TOKENS),
  _m('topk_bound_share', 'share', 'tokens whose set top_k cut', 'policy', _TOKENS),
  _m('identical_share', 'share', 'all members alike', 'policy', 'identical_count'),
  _m('identical_count', 'groups', 'with 2 members that sampled, or more', 'policy'),
  _m('kept_mass', 'share', "learner's mass on the set", 'policy', 'kept_mass_count'),
  _m('kept_mass_count', 'tokens', 'tokens the kept mass was measured on', 'policy'),
  _m('k1', 'nats', 'mean of -d, d = logp - mu_logp', 'mismatch', _TOKENS),
  _m('k2', 'nats', 'mean of d^2 / 2', 'mismatch', _TOKENS),
  _m('k3', 'nats', 'mean of exp(d) - 1 - d', 'mismatch', _TOKENS),
  _m('k3_max', 'nats', 'largest exp(d) - 1 - d', 'mismatch'),
  _m('k1_signal', 'nats', 'k1 where the set holds > 1 id', 'mismatch', 'signal_count'),
  _m('k2_signal', 'nats', 'k2 where the set holds > 1 id', 'mismatch', 'signal_count'),
  _m('k3_signal', 'nats', 'k3 where the set holds > 1 id', 'mismatch', 'signal_count'),
  _m('signal_count', 'tokens', 'sampled tokens whose set holds > 1 id', 'mismatch'),
  _m('k3_same_version', 'nats', 'k3 at equal versions', 'mismatch', 'fresh_count'),
  _m('fresh_count', 'tokens', 'trained tokens of the newest version', 'mismatch'),
  _m('ratio_mean', 'ratio', 'mean of exp(d)', 'mismatch', _TOKENS),
  _m('ratio_max', 'ratio', 'largest exp(d)', 'mismatch'),
  _m('ratio_outside', 'share', 'ratios outside [0.9, 1.1]', 'mismatch', _TOKENS),
  _m('ratio_outside_signal', 'share', 'the same', 'mismatch', 'signal_count'),
  _m('ess', 'share', 'effective sample size over tokens', 'mismatch', _TOKENS),
  _m('tis_capped_share', 'share', 'importance weights at the cap', 'mismatch', _TOKENS),
  _m('silenced_share', 'share', 'clipped or masked', 'mismatch', 'silenced_count'),
  _m('silenced_count', 'tokens', 'trained tokens with an advantage', 'mismatch'),
  _m(
    'sequence_masked_share',
    'share',
    'tokens of masked episodes',
    'mismatch',
    'trained_tokens',
  ),
  _m('episode_k1', 'nats', 'mean of -D, D = sum of d', 'mismatch', 'episode_count'),
  _m('episode_k2', 'nats', 'mean of D^2 / 2', 'mismatch', 'episode_count'),
  _m('episode_k3', 'nats', 'mean of exp(D) - 1 - D', 'mismatch', 'episode_count'),
  _m('episode_ess', 'share', 'ESS over episodes', 'mismatch', 'episode_count'),
  _m(
    'episode_outside',
    'share',
    'geometric ratios outside [0.9, 1.1]',
    'mismatch',
    'episode_count',
  ),
  _m('episode_distance_max', 'nats', 'largest |mean of d| of an episode', 'mismatch'),
  _m('episode_count', 'episodes', 'trained episodes', 'mismatch'),
  _m(
    'kl_reference',
    'nats',
    'mean of k1 = log pi - log reference, whole vocabulary',
    'mismatch',
    'trained_tokens',
  ),
  _m('kl_reference_k3', 'nats', 'k3 of the same', 'mismatch', 'trained_tokens'),
  _m(
    'route_mismatch',
    'share',
    'recorded routes whose experts the router would not choose',
    'mismatch',
    'route_mismatch_count',
  ),
  _m('route_mismatch_count', 'routes', 'recorded, one a token and layer', 'mismatch'),
  _m('expert_load_max', 'ratio', 'load of the busiest expert over the mean', 'policy'),
  _m('staleness_mean', 'steps', 'age of oldest tokens', 'staleness', 'staleness_count'),
  _m('staleness_max', 'steps', "age of the batch's oldest token", 'staleness'),
  _m('staleness_count', 'groups', 'groups the mean age is over', 'staleness'),
  _m('thinking_tokens', 'tokens', 'an episode, inside <think>', 'episode', _VALID),
  _m('sampled_tokens', 'tokens', 'an episode, sampled', 'episode', _VALID),
  _m('total_tokens', 'tokens', 'an episode, all that it read', 'episode', _VALID),
  _m('turns', 'turns', 'assistant messages an episode', 'episode', _VALID),
  _m('calls_per_turn', 'calls', 'tool calls a turn', 'episode', _VALID),
  _m('duplicate_calls', 'calls', 'asked again for nothing', 'episode', _VALID),
  _m('tests', 'calls', 'calls of the test tool an episode', 'episode', _VALID),
  _m('tool_seconds', 's', 'spent in tools an episode', 'episode', _VALID),
  _m('episode_seconds', 's', 'wall time of an episode', 'episode', _VALID),
  _m('turn_seconds', 's', 'wall time of a turn, tools included', 'episode', _VALID),
  _m('tokens_per_second', 'tokens/s', 'sampled, whole run, over the step', 'speed'),
  _m('trained_tokens', 'tokens', 'tokens the loss was over', 'speed'),
  _m('learner_tokens_per_second', 'tokens/s', 'trained per second of update', 'speed'),
  _m('step_seconds', 's', 'wall time since the last row', 'speed'),
  _m('wait_seconds', 's', 'part of step_seconds: waiting for groups', 'speed'),
  _m('publish_seconds', 's', 'part of step_seconds: publishing weights', 'speed'),
  _m('checkpoint_seconds', 's', 'part of step_seconds: checkpointing', 'speed'),
  _m('loop_lag', 's', "longest stall of the rollout's event loop", 'speed'),
  _m('loss', '', 'policy loss', 'optimiser'),
  _m('grad_norm', '', 'global gradient norm', 'optimiser'),
  _m('update_rms', '', 'RMS of the parameter update', 'optimiser'),
  _m('lr', '', 'learning rate', 'optimiser'),
  _m('skipped_steps', 'steps', 'updates skipped so far (not finite)', 'optimiser'),
  _m('delta_bytes', 'bytes', 'compressed weight delta', 'sync'),
  _m('delta_share', 'share', 'delta bytes of full snapshot bytes', 'sync'),
  _m('delta_changed_share', 'share', 'weights whose bf16 value changed', 'sync'),
)
NAMES: tuple[str, ...] = tuple(m.name for m in METRICS)


def mean(values: Any) -> float | None:
  """Mean of `values`, or None where there are none (never 0, never NaN)."""
  values = np.asarray(values, np.float64)
  return float(values.mean()) if values.size else None


def row(*, step: int, **values: Any) -> dict[str, int | float | None]:
  """A complete row: every declared key in order, None where no value was given.

  Accepts Python and numpy numbers and 0-d arrays. ValueError, naming the key, on an
  undeclared name, a value that is no finite number, or a mean without its count.
  """
  for name in values:
    if name not in NAMES:
      near = difflib.get_close_matches(name, NAMES, 1)
      hint = f'; did you mean {near[0]!r}?' if near else ''
      raise ValueError(f'metric {name!r} is not declared in records.METRICS{hint}')
  values['step'] = step
  full = {name: _number(name, values.get(name)) for name in NAMES}
  if not isinstance(full['step'], int) or full['step'] < 0:
    raise ValueError(f'metric step: got {step!r}, want an integer >= 0')
  for m in METRICS:
    if m.count and full[m.name] is not None and not full[m.count]:
      raise ValueError(
        f'metric {m.name} is a mean over {m.count}: got {m.name}={full[m.name]!r} '
        f'with {m.count}={full[m.count]!r}, want a count >= 1 (or {m.name}=None)'
      )
  return full


def _number(name: str, value: Any) -> int | float | None:
  """`value` as a finite Python number, or None. ValueError with the metric's name."""
  if value is None:
    return None
  if not isinstance(value, numbers.Real) and hasattr(value, 'shape'):
    array = np.asarray(value)
    if array.shape == () and array.dtype.kind in 'iuf':
      value = array.item()
    elif array.shape == () and array.dtype.kind == 'V':  # bfloat16 and its kin
      value = float(value)
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
    raise ValueError(f'metric {name}: got {value!r}, want a number or None')
  if not math.isfinite(value):
    raise ValueError(f'metric {name}: got {value}, want a finite number or None')
  return int(value) if isinstance(value, numbers.Integral) else float(value)


class Writer:
  """Appends rows to `metrics.jsonl` and to TensorBoard events of the run folder."""

  def __init__(self, run_dir: str, *, resume_step: int | None = None):
    """Opens a new run, or goes on after `resume_step`, the last step that counts.

    On resume, rows after `resume_step` are cut off (they will be trained again), and
    rows lost between the last row and `resume_step` are filled in as all null, so that
    steps neither repeat nor skip. Without it, a folder that has rows is a ValueError.
    """
    path = os.path.join(run_dir, FILE)
    rows = read(run_dir)
    if resume_step is None and rows:
      raise ValueError(
        f'{path} already holds steps up to {rows[-1]["step"]}: resume the run '
        '(resume_step=...) or choose another run folder'
      )
    self._next: int | None = None
    lost = range(0)
    if resume_step is None or rows:
      # Also drops a torn line, which would stay in the middle once we append.
      rows = [r for r in rows if resume_step is not None and r['step'] <= resume_step]
      os.makedirs(run_dir, exist_ok=True)
      lines.replace(path, b''.join(map(lines.dump, rows)))
    if resume_step is not None:
      lost = range(rows[-1]['step'] + 1 if rows else 1, resume_step + 1)
      self._next = resume_step + 1
    self._lines = lines.Lines(path)
    for step in lost:
      self._lines.write(row(step=step))
    self._board = board.Board(os.path.join(run_dir, 'tensorboard'), self._next)

  def write(self, values: Mapping[str, Any]) -> None:
    """Appends one row, as `row(**values)`. ValueError on a repeated or skipped step."""
    full = row(**values)
    step = int(full['step'] or 0)
    if self._next is None and step not in (0, 1):
      raise ValueError(f'metrics: got step={step} as the first, want 0 or 1')
    if self._next is not None and step != self._next:
      raise ValueError(f'metrics: got step={step}, want step={self._next}')
    self._lines.write(full)
    scalars = {f'{m.group}/{m.name}': full[m.name] for m in METRICS if m.name != 'step'}
    self._board.write(step, {k: x for k, x in scalars.items() if x is not None})
    self._next = step + 1

  def close(self) -> None:
    self._lines.close()
    self._board.close()

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class EventLog:
  """Free-form one-line JSON events, on the writing process's own clock."""

  def __init__(self, path: str):
    self._lines = lines.Lines(path)

  def write(self, kind: str, **fields: Any) -> None:
    """Appends `{"time": seconds since 1970, "kind": kind, **fields}`.

    ValueError where a field is not JSON or not finite.
    """
    try:
      self._lines.write({'time': round(time.time(), 3), 'kind': kind, **fields})
    except ValueError as e:
      raise ValueError(f'event {kind!r} cannot be written as JSON: {e}') from e

  def close(self) -> None:
    self._lines.close()

  def __enter__(self) -> 'EventLog':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def read(run_dir: str) -> list[dict[str, Any]]:
  """Rows of a run in order of steps; [] where none were written yet.

  A torn last line (its writer was killed) is dropped with a warning. ValueError,
  naming the line, on any other damage.
  """
  path = os.path.join(run_dir, FILE)
  raw = lines.split(path)
  rows: list[dict[str, Any]] = []
  for i, line in enumerate(raw):
    value = lines.parse(line)
    if value is None and i == len(raw) - 1:
      logging.warning('%s: dropped a torn last line of %d bytes', path, len(line))
      break
    if value is None or not isinstance(value.get('step'), int):
      raise ValueError(f'{path} line {i + 1}: not a row of metrics: {line[:60]!r}')
    if rows and value['step'] != rows[-1]['step'] + 1:
      raise ValueError(
        f'{path} line {i + 1}: got step={value["step"]}, want {rows[-1]["step"] + 1}'
      )
    rows.append({**dict.fromkeys(NAMES), **value})
  return rows


def read_events(path: str) -> list[dict[str, Any]]:
  """Events of one file in order of writing; [] where it does not exist.

  Several processes may have died on one file, so torn lines are dropped anywhere,
  with a warning that counts them.
  """
  raw = lines.split(path)
  events = [value for value in map(lines.parse, raw) if value and 'kind' in value]
  if len(events) < len(raw):
    logging.warning('%s: dropped %d torn lines', path, len(raw) - len(events))
  return events
