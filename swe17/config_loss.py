"""Settings of the loss: objective, baseline, masks, and what length costs."""

import dataclasses

from swe17 import fields

_f, _want = fields.setting, fields.want
_at_least, _above, _one_of = fields.at_least, fields.above, fields.one_of


@dataclasses.dataclass(frozen=True)
class Length:
  """What length costs; every value is ours."""

  kind: str = _f('none', 'none | alternating (budget phases) | linear (R = S - l C)')
  w_tokens: float = _f(1.0, 'cost of a sampled token')
  w_turns: float = _f(10.0, 'cost of an assistant message')
  w_tool: float = _f(10.0, 'cost of a second in tools')
  phase_steps: int = _f(20, 'alternating: optimiser steps a phase')
  percentile: float = _f(50.0, 'alternating: budget among costs of successes [%]')
  form: str = _f('linear', 'alternating: linear (capped) | hard (the cap at once)')
  slope: float = _f(0.5, 'alternating: penalty at twice the budget')
  cap: float = _f(0.5, 'alternating: largest penalty, below 1')
  gate: float = _f(0.0, 'alternating: least solve rate of a group that is penalised')
  effort: str = _f('medium', 'linear: low | medium | high, which lambda is used')
  lambda_low: float = _f(1e-3, 'linear: reward a unit of cost takes, at low effort')
  lambda_medium: float = _f(3e-4, 'linear: the same at medium effort')
  lambda_high: float = _f(1e-4, 'linear: the same at high effort')

  def __post_init__(self):
    at = 'loss.length.'
    _one_of(self, at, 'kind', 'none', 'alternating', 'linear')
    _one_of(self, at, 'form', 'linear', 'hard')
    _one_of(self, at, 'effort', 'low', 'medium', 'high')
    _at_least(self, at, 0, 'w_tokens', 'w_turns', 'w_tool', 'slope', 'gate')
    _at_least(self, at, 0, 'lambda_low', 'lambda_medium', 'lambda_high')
    _at_least(self, at, 1, 'phase_steps')
    _want(0 <= self.percentile <= 100, f'{at}percentile', self.percentile, '0 to 100')
    _want(0 <= self.cap < 1, f'{at}cap', self.cap, 'in [0, 1)')

  @property
  def lam(self) -> float:
    """Lambda of the effort level."""
    levels = {'low': self.lambda_low, 'medium': self.lambda_medium}
    return levels.get(self.effort, self.lambda_high)


_OBJECTIVES = (
  'reinforce_tis',
  'icepop',
  'cispo',
  'ppo_clip',
  'decoupled_ppo',
  'gspo',
  'dppo',
)


@dataclasses.dataclass(frozen=True)
class Loss:
  objective: str = _f('reinforce_tis', ' | '.join(_OBJECTIVES))
  baseline: str = _f('length_weighted', 'length_weighted | mean | leave_one_out')
  baseline_tokens: str = _f('sampled', 'length_weighted: sampled | signal (set > 1)')
  replay: bool = _f(True, 'renormalise over the recorded kept sets')
  level: str = _f('token', 'token | turn | episode: unit of the ratio (geometric mean)')
  tis_cap: float = _f(2.0, 'cap C of the truncated importance weight')
  icepop_low: float = _f(0.5, 'icepop: smallest ratio kept')
  icepop_high: float = _f(5.0, 'icepop: largest ratio kept')
  cispo_high: float = _f(4.0, 'cispo: ratios are clipped above at 1 + this')
  clip_low: float = _f(0.2, 'PPO objectives: clip at 1 - this')
  clip_high: float = _f(0.28, 'PPO objectives: clip at 1 + this')
  gspo_low: float = _f(3e-4, 'gspo: clip of the geometric ratio at 1 - this')
  gspo_high: float = _f(4e-4, 'gspo: clip of the geometric ratio at 1 + this')
  dppo_gap: float = _f(0.2, 'dppo: largest gap of probability along the advantage')
  dppo_penalty: float = _f(1e-3, 'dppo: weight of (log ratio)^2')
  sequence_mask: str = _f('none', 'none | geometric | off_policy: episodes left out')
  geometric_low: float = _f(0.9, 'geometric mask: smallest geometric ratio kept')
  geometric_high: float = _f(1.1, 'geometric mask: largest geometric ratio kept')
  off_policy_delta: float = _f(
    0.05, 'off_policy mask: bound of mean k1 if A < 0 [nats]'
  )
  mask_overlong: bool = _f(False, 'episodes cut at a limit stay outside of the loss')
  calls_scale: str = _f('none', 'none | divide | multiply: A by tool calls per turn')
  credit: str = _f('episode', 'episode | turn: what has an advantage of its own')
  gamma: float = _f(0.4, 'credit by turn: discount of the scores of later turns')
  kl_weight: float = _f(0.0, 'penalty on the KL to the reference [1/nat]; 0: off')
  kl_reference: str = _f('start', 'start: the policy that RL starts from (version 0)')
  length: Length = Length()

  def __post_init__(self):
    _one_of(self, 'loss.', 'objective', *_OBJECTIVES)
    _one_of(self, 'loss.', 'baseline', 'length_weighted', 'mean', 'leave_one_out')
    _one_of(self, 'loss.', 'baseline_tokens', 'sampled', 'signal')
    _one_of(self, 'loss.', 'level', 'token', 'turn', 'episode')
    _one_of(self, 'loss.', 'sequence_mask', 'none', 'geometric', 'off_policy')
    _one_of(self, 'loss.', 'calls_scale', 'none', 'divide', 'multiply')
    _one_of(self, 'loss.', 'credit', 'episode', 'turn')
    _one_of(self, 'loss.', 'kl_reference', 'start')
    _at_least(self, 'loss.', 1, 'tis_cap', 'icepop_high', 'geometric_high')
    _at_least(self, 'loss.', 0, 'cispo_high', 'clip_high', 'gspo_high')
    _at_least(self, 'loss.', 0, 'dppo_gap', 'dppo_penalty', 'off_policy_delta')
    _at_least(self, 'loss.', 0, 'kl_weight')
    _want(0 <= self.gamma <= 1, 'loss.gamma', self.gamma, 'in [0, 1]')
    for name in ('icepop_low', 'geometric_low'):
      got = getattr(self, name)
      _want(0 < got <= 1, f'loss.{name}', got, 'in (0, 1]')
    for name in ('clip_low', 'gspo_low'):
      got = getattr(self, name)
      _want(0 <= got < 1, f'loss.{name}', got, 'in [0, 1)')
    if self.level != 'token' and self.objective not in _OBJECTIVES[:3]:
      raise ValueError(
        f'loss.level={self.level!r} with loss.objective={self.objective!r}: the ratio '
        f'of a turn or episode weighs {", ".join(_OBJECTIVES[:3])} only; set '
        "loss.level='token' (gspo is at the level of episodes by itself)"
      )
    if self.credit == 'turn' and self.length.kind != 'none':
      raise ValueError(
        f'loss.credit={self.credit!r} with loss.length.kind={self.length.kind!r}: '
        'length is paid for by whole episodes and no turn has a share of it; set '
        "loss.length.kind='none' or loss.credit='episode'"
      )
