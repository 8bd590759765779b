"""What in a row of metrics says that a run is going wrong.

Pure: a row, the rows before it and limits in, sentences out. An alarm is given at the
step where its condition *begins*, not again while it lasts; a skipped update is
given every time. Bounds are published ones where FACTS has them (k3 > 0.05 on tokens
with a choice means the run is failing; healthy is 3e-4 to 1e-3), else ours.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from swe17 import config


@dataclasses.dataclass(frozen=True)
class Limits:
  """Where alarms begin. Shares are of 1; a limit of None is off."""

  k3_signal: float = 0.05  # nats
  k3_equal: float | None = 1e-6  # nats, at staleness 0 under replay
  entropy_share: float = 0.2  # of the mean of the first `start_steps` steps
  start_steps: int = 3
  top_p: float | None = None  # least kept mass
  max_staleness: int | None = None  # optimiser steps
  no_signal_share: float = 0.9
  no_signal_steps: int = 5
  ess: float = 0.5
  topk_bound_share: float = 0.2
  malformed_share: float = 0.5
  invalid_share: float = 0.1
  cut_share: float = 0.5
  loop_lag: float = 0.5  # s


def limits(cfg: config.Config) -> Limits:
  """Limits of a run: its staleness bound, and what its filters and replay promise."""
  replay = cfg.loss.replay
  return Limits(
    k3_equal=Limits.k3_equal if replay else None,
    top_p=cfg.sampler.top_p if replay and cfg.sampler.top_p < 1 else None,
    max_staleness=cfg.rollout.max_staleness,
  )


def alarms(
  row: Mapping[str, Any], history: Sequence[Mapping[str, Any]], limits: Limits
) -> list[str]:
  """Sentences for what begins to be wrong at `row`; `history` is the rows before it."""
  now = _conditions(row, history, limits)
  before = _conditions(history[-1], history[:-1], limits) if history else {}
  new = [text for name, text in now.items() if name not in before]
  skipped = _skipped(row, history)
  return new + ([skipped] if skipped else [])


def _conditions(
  row: Mapping[str, Any], history: Sequence[Mapping[str, Any]], limits: Limits
) -> dict[str, str]:
  """Every condition that holds at `row`, by name. Null values raise none."""
  return {
    **_mismatch(row, limits),
    **_collapse(row, history, limits),
    **_starved(row, history, limits),
    **_episodes(row, limits),
  }


def _mismatch(row: Mapping[str, Any], limits: Limits) -> dict[str, str]:
  found = {}
  k3, stale = row['k3_signal'], row['staleness_max']
  if _above(k3, limits.k3_signal):
    found['k3_signal'] = (
      f'k3 on tokens with a choice is {k3:.3g} nats, over {limits.k3_signal}: sampler '
      'and learner disagree; look at staleness, weight digests and the filters'
    )
  if stale == 0 and _above(row['k3'], limits.k3_equal):
    found['k3_equal'] = (
      f'k3 is {row["k3"]:.3g} nats at staleness 0, over the numeric floor of '
      f'{limits.k3_equal}: equal weights must give equal log-probs; compare the '
      'weight digests, then the two forward passes'
    )
  if _above(stale, limits.max_staleness):
    found['staleness'] = (
      f'the oldest token of the batch is {stale} steps old, over the bound of '
      f'{limits.max_staleness}: look at the buffer and at how fast samplers follow'
    )
  if _below(row['ess'], limits.ess):
    found['ess'] = (
      f'the effective sample size is {row["ess"]:.1%} of the tokens, under '
      f'{limits.ess:.0%}: few tokens carry the gradient; look at ratio_max, staleness'
    )
  return found


def _collapse(
  row: Mapping[str, Any], history: Sequence[Mapping[str, Any]], limits: Limits
) -> dict[str, str]:
  found = {}
  start = [r['entropy'] for r in history if r['entropy'] is not None]
  if len(start) >= limits.start_steps:
    start = sum(start[: limits.start_steps]) / limits.start_steps
    if _below(row['entropy'], limits.entropy_share * start):
      found['entropy'] = (
        f'entropy fell to {row["entropy"]:.3g} nats, under {limits.entropy_share:.0%} '
        f'of its start ({start:.3g}): the policy is collapsing; look at the learning '
        'rate, replay and top_p'
      )
  mass = row['kept_mass']
  if _below(mass, limits.top_p):
    found['kept_mass'] = (
      f'the learner puts {mass:.4f} of its mass on the kept sets, under '
      f'top_p={limits.top_p}: the sets have gone stale; look at staleness and at '
      f'topk_bound_share ({_share(row["topk_bound_share"])})'
    )
  if _above(row['topk_bound_share'], limits.topk_bound_share):
    found['topk'] = (
      f'top_k cut the kept set of {row["topk_bound_share"]:.1%} of the tokens, over '
      f'{limits.topk_bound_share:.0%}: top_p no longer decides; raise sampler.top_k'
    )
  return found


def _starved(
  row: Mapping[str, Any], history: Sequence[Mapping[str, Any]], limits: Limits
) -> dict[str, str]:
  found = {}
  last = [*history, row][-limits.no_signal_steps :]
  shares = [_no_signal(r) for r in last]
  if len(last) == limits.no_signal_steps and all(
    _above(share, limits.no_signal_share) for share in shares
  ):
    found['no_signal'] = (
      f'over {limits.no_signal_share:.0%} of the groups gave no signal for '
      f'{limits.no_signal_steps} steps (now {_share(shares[-1])}): tasks are all too '
      'easy or all too hard; look at the solve rate and at the task mix'
    )
  if row['delta_changed_share'] == 0 and (row['groups_trained'] or 0) > 0:
    found['unchanged'] = (
      f'step {row["step"]} trained {row["groups_trained"]} groups and changed no '
      'published weight: updates are below bf16 rounding; look at lr and update_rms'
    )
  return found


def _episodes(row: Mapping[str, Any], limits: Limits) -> dict[str, str]:
  found = {}
  for name, what in (
    ('invalid_share', 'were spoiled by infrastructure; look at events.jsonl'),
    ('malformed_share', 'made a malformed tool call; read some in episodes/'),
    ('cut_share', 'were cut at a length or turn limit; look at agent.max_turns'),
  ):
    limit = getattr(limits, name)
    if _above(row[name], limit):
      found[name] = f'{row[name]:.1%} of the episodes (over {limit:.0%}) {what}'
  if _above(row['loop_lag'], limits.loop_lag):
    found['loop_lag'] = (
      f"the rollout's event loop stalled for {row['loop_lag']:.2f} s, over "
      f'{limits.loop_lag} s: something blocks it; look at verifiers and file writes'
    )
  return found


def _skipped(
  row: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> str | None:
  known = [r['skipped_steps'] for r in history if r['skipped_steps'] is not None]
  before = known[-1] if known else 0
  if not _above(row['skipped_steps'], before):
    return None
  return (
    f'the update of step {row["step"]} was skipped, {row["skipped_steps"]} so far: its '
    'gradient was not finite; look at grad_norm, lr and ratio_max of the steps before'
  )


def _no_signal(row: Mapping[str, Any]) -> float | None:
  none, some = row['groups_no_signal'], row['groups_trained']
  if none is None or some is None or none + some == 0:
    return None
  return none / (none + some)


def _above(value: float | None, limit: float | None) -> bool:
  return value is not None and limit is not None and value > limit


def _below(value: float | None, limit: float | None) -> bool:
  return value is not None and limit is not None and value < limit


def _share(value: float | None) -> str:
  return 'not recorded' if value is None else f'{value:.1%}'
