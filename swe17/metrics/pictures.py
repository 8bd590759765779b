"""What the report of a run draws: one picture, one claim, axes with units."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
  """A column of the rows, drawn times `scale`."""

  column: str
  label: str
  scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Guide:
  """A horizontal line at a number, or at the value of a setting (by dotted name)."""

  at: float | str
  label: str
  scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Picture:
  """One picture: what it shows, its axis with unit, and how to read it."""

  name: str
  title: str
  ylabel: str
  note: str
  lines: tuple[Line, ...]
  guides: tuple[Guide, ...] = ()
  log: bool = False
  parts_of: Line | None = None  # stacked: `lines` are parts of this whole


PICTURES: tuple[Picture, ...] = (
  Picture(
    'solve_rate',
    'Solve rate in training',
    'episodes solved [%]',
    'Share of the valid episodes of each step that solved their task. Squares: '
    'evaluations on held-out tasks, with 95 % intervals.',
    (Line('solve_rate', 'training tasks', 100),),
  ),
  Picture(
    'entropy',
    'Entropy of the policy',
    'entropy [nats a token]',
    'Full: whole vocabulary, at the sampler. Kept: over the recorded kept sets, at the '
    'learner. A steep fall of both is collapse.',
    (Line('entropy', 'full vocabulary'), Line('kept_entropy', 'kept set')),
  ),
  Picture(
    'k3',
    'Mismatch of sampler and learner',
    'k3 [nats a token]',
    'Mean of exp(d) - 1 - d with d = logp - mu_logp. It holds the age of the tokens as '
    'well; above 0.05 a run is failing.',
    (
      Line('k3', 'all sampled tokens'),
      Line('k3_signal', 'tokens with a choice (kept set > 1)'),
    ),
    (Guide(0.05, 'failing'),),
    log=True,
  ),
  Picture(
    'ratio',
    'Mean ratio against kept mass',
    'ratio, mass [1]',
    'With replay the mean ratio stays at 1. Without, it equals the kept mass: what the '
    "learner's full distribution puts on the sampler's sets.",
    (
      Line('ratio_mean', 'mean ratio exp(logp - mu_logp)'),
      Line('kept_mass', 'kept mass'),
    ),
    (Guide('sampler.top_p', 'top_p'),),
  ),
  Picture(
    'staleness',
    'Staleness of what is trained',
    'age [learner steps]',
    "Learner step minus the step that made the weights of a group's oldest token.",
    (Line('staleness_mean', 'mean of groups'), Line('staleness_max', 'oldest')),
    (Guide('rollout.max_staleness', 'bound'),),
  ),
  Picture(
    'tokens',
    'Tokens an episode',
    'tokens an episode',
    'Thinking: sampled between think tags. Sampled: all that the agent wrote. Total: '
    'with the prompt and the results of tools.',
    (
      Line('thinking_tokens', 'thinking'),
      Line('sampled_tokens', 'sampled'),
      Line('total_tokens', 'total'),
    ),
  ),
  Picture(
    'strategy',
    'What the agent does',
    'count',
    'Calls of the test tool an episode, turns an episode, tool calls a turn.',
    (
      Line('tests', 'tests an episode'),
      Line('turns', 'turns an episode'),
      Line('calls_per_turn', 'calls a turn'),
    ),
  ),
  Picture(
    'reward',
    'Reward, and calls of a turn',
    'share [1]',
    'Mean shaped reward of a valid episode. Beside it the tool calls of a turn, as a '
    'share of 8, and calls an episode that asked again for what it had been told.',
    (
      Line('reward', 'mean reward'),
      Line('calls_per_turn', 'calls a turn / 8', 1 / 8),
      Line('duplicate_calls', 'duplicate calls an episode'),
    ),
  ),
  Picture(
    'endings',
    'How episodes end',
    'episodes [%]',
    'By their own submit, cut at a length or turn limit, with a malformed call, or '
    'invalid (spoiled by infrastructure, outside all statistics).',
    (
      Line('submitted_share', 'submitted', 100),
      Line('cut_share', 'cut', 100),
      Line('malformed_share', 'malformed call', 100),
      Line('invalid_share', 'invalid', 100),
    ),
  ),
  Picture(
    'throughput',
    'Throughput',
    'tokens a second',
    'Sampled: all samplers together, over wall time. Learner: trained tokens over the '
    'time of its updates alone.',
    (
      Line('tokens_per_second', 'sampled'),
      Line('learner_tokens_per_second', 'learner, while updating'),
    ),
  ),
  Picture(
    'step_time',
    'Where the time of a step goes',
    'time of a step [s]',
    'Whole bars are wall time between rows; the rest is the update and batching.',
    (
      Line('wait_seconds', 'waiting for groups'),
      Line('publish_seconds', 'publishing weights'),
      Line('checkpoint_seconds', 'checkpointing'),
    ),
    parts_of=Line('step_seconds', 'rest'),
  ),
  Picture(
    'delta',
    'Size of weight deltas',
    'share [%]',
    'Compressed bytes of a delta as a share of a full snapshot, and the share of '
    'weights whose published bf16 value changed.',
    (
      Line('delta_share', 'bytes', 100),
      Line('delta_changed_share', 'weights changed', 100),
    ),
  ),
  Picture(
    'gradient',
    'Gradient norm',
    'global norm',
    'Before the optimiser; spikes announce trouble.',
    (Line('grad_norm', 'gradient norm'),),
    log=True,
  ),
)
