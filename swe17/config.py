"""Every setting, once: its default, its meaning and unit, and what it must satisfy.

Functions take the sub-config they use (`cfg.optim`, `cfg.loss`), never the root. The
defaults are ours: what SWE-1.7 used is mostly undisclosed.
"""

import dataclasses
import re

from swe17 import config_env, config_loss, config_model, fields, types

# Sections that fill a file of their own.
Tasks, Sandbox = config_env.Tasks, config_env.Sandbox
Model, Mesh = config_model.Model, config_model.Mesh
Length, Loss = config_loss.Length, config_loss.Loss
_f, _want = fields.setting, fields.want
_at_least, _above, _one_of = fields.at_least, fields.above, fields.one_of
# What store/kv.py opens and several processes can share.
_STORE = re.compile(r'file:///.*|(gs|s3)://[a-z0-9][a-z0-9._-]+[a-z0-9](/\S*)?')


@dataclasses.dataclass(frozen=True)
class Agent:
  max_turns: int = _f(14, 'assistant messages an episode')
  max_new_tokens: int = _f(64, 'sampled tokens a turn')
  max_context: int = _f(448, 'tokens of an episode, prompt included')
  max_calls: int = _f(8, 'tool calls a turn')
  on_malformed: str = _f('end', 'end (outcome 0) | answer (an error message)')
  thoughts: str = _f('keep', 'those of earlier turns: keep | strip, in a new segment')
  harness: str = _f('', "empty: our own loop | mini_swe_agent | 'command: words'")
  harness_settings: str = _f('', "the agent's own settings file; empty: ours")
  max_tokens: int = _f(0, 'sampled tokens of an episode behind the proxy; 0: any')
  call_seconds: float = _f(60.0, 'wall time of a tool call [s]')
  episode_seconds: float = _f(120.0, 'wall time of an episode [s]')

  def __post_init__(self):
    _one_of(self, 'agent.', 'on_malformed', 'end', 'answer')
    _one_of(self, 'agent.', 'thoughts', 'keep', 'strip')
    _at_least(
      self, 'agent.', 1, 'max_turns', 'max_new_tokens', 'max_context', 'max_calls'
    )
    _at_least(self, 'agent.', 0, 'max_tokens')
    _above(self, 'agent.', 0, 'episode_seconds', 'call_seconds')


@dataclasses.dataclass(frozen=True)
class Imitation:
  episodes: int = _f(2000, 'scripted episodes to imitate')
  steps: int = _f(300, 'optimiser steps')
  rows: int = _f(4, 'packed rows a step')
  lr: float = _f(8e-3, 'peak learning rate')
  practice: float = _f(0.4, 'share of them that only practise edits, untested')
  careful: float = _f(0.0, 'share of the others that a careful agent shows')
  context_weight: float = _f(0.1, 'loss weight of tokens the agent did not write')

  def __post_init__(self):
    _at_least(self, 'imitation.', 0, 'steps', 'context_weight')
    _at_least(self, 'imitation.', 1, 'episodes', 'rows')
    _above(self, 'imitation.', 0, 'lr')


@dataclasses.dataclass(frozen=True)
class Sampler:
  processes: int = _f(2, 'sampler processes')
  slots: int = _f(32, 'sequences decoded at once by one sampler')
  decode_steps: int = _f(4, 'decode steps a dispatch')
  prefill_rows: int = _f(16, 'sequences prefilled at once')
  prefill_chunk: int = _f(16, 'prompt tokens prefilled at once')
  decode_widths: str = _f(
    '', 'further numbers of rows to decode for, comma-separated; slots always is one'
  )
  page: int = _f(64, 'positions of a KV page')
  kv_pages: int = _f(0, 'KV pages; 0: enough for all slots at full length')
  on_swap: str = _f(
    'keep', 'contexts at a weight swap: keep | recompute | drain (end first)'
  )
  queue: int = _f(256, 'requests that may wait; beyond that callers are sent away')
  drain_seconds: float = _f(1.0, 'time that open requests have after SIGTERM [s]')
  temperature: float = _f(1.0, 'sampling temperature')
  min_p: float = _f(0.0, 'keep p >= min_p p_max; 0 = off')
  top_k: int = _f(32, 'most ids a kept set may hold; 0 = off')
  top_p: float = _f(0.95, 'nucleus mass; 1 = off')
  repetition_penalty: float = _f(1.0, 'only 1 (off): a penalty is not replayable')
  threads: int = _f(1, 'CPU threads of one sampler')
  poll_seconds: float = _f(0.2, 'how often the next weight manifest is looked for [s]')
  host: str = _f('127.0.0.1', 'address that samplers listen at; 0.0.0.0: everywhere')
  address: str = _f('', 'host name by which routers reach them; empty: the own one')

  def __post_init__(self):
    _at_least(self, 'sampler.', 1, 'processes', 'slots', 'decode_steps')
    _at_least(self, 'sampler.', 1, 'prefill_rows', 'prefill_chunk', 'threads', 'queue')
    _at_least(self, 'sampler.', 1, 'page')
    _at_least(self, 'sampler.', 0, 'top_k', 'kv_pages', 'drain_seconds')
    _one_of(self, 'sampler.', 'on_swap', 'keep', 'recompute', 'drain')
    for width in filter(None, self.decode_widths.split(',')):
      right = width.strip().isdigit() and 0 < int(width) <= self.slots
      want = f'numbers from 1 to slots={self.slots}'
      _want(right, 'sampler.decode_widths', self.decode_widths, want)
    _above(self, 'sampler.', 0, 'repetition_penalty', 'poll_seconds')
    _want(0 < self.top_p <= 1, 'sampler.top_p', self.top_p, 'in (0, 1]')
    _want(0 <= self.min_p < 1, 'sampler.min_p', self.min_p, 'in [0, 1)')

  @property
  def widths(self) -> tuple[int, ...]:
    """Numbers of rows that decoding is compiled for, ascending."""
    further = {int(width) for width in filter(None, self.decode_widths.split(','))}
    return tuple(sorted(further | {self.slots}))

  @property
  def sampling(self) -> types.Sampling:
    return types.Sampling(self.temperature, self.min_p, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class Rollout:
  processes: int = _f(1, 'rollout processes')
  group_size: int = _f(8, 'episodes a group')
  max_staleness: int = _f(3, 'age bound of a group [optimiser steps]')
  ahead: int = _f(2, 'batches issued beyond what the learner has consumed')
  eval_samples: int = _f(2, 'episodes per held-out task')
  retries: int = _f(2, 'further attempts at a group that infrastructure spoiled')
  dead_groups: int = _f(
    24, 'groups in a row without outcomes that end the run; 0: none do'
  )
  keep_episodes: int = _f(2, 'episodes written out to read, per step')
  request_seconds: float = _f(120.0, 'longest silence of a sampler about a request [s]')
  turn_seconds: float = _f(600.0, 'wall time of a turn, whoever is asked for it [s]')
  group_seconds: float = _f(3600.0, 'wall time of a group, all attempts at it [s]')
  drain_seconds: float = _f(2.0, 'time for groups to end after SIGTERM [s]')
  requests_at_once: int = _f(16, 'answers under way for one agent behind the proxy')
  client_sampling: bool = _f(
    False, 'agents behind the proxy set temperature and filters'
  )

  def __post_init__(self):
    _above(self, 'rollout.', 0, 'request_seconds', 'turn_seconds', 'group_seconds')
    _at_least(self, 'rollout.', 0, 'drain_seconds', 'dead_groups')
    _at_least(self, 'rollout.', 1, 'requests_at_once')
    _at_least(self, 'rollout.', 2, 'group_size')
    _at_least(self, 'rollout.', 0, 'max_staleness', 'retries', 'keep_episodes')
    _at_least(self, 'rollout.', 1, 'processes', 'eval_samples')


@dataclasses.dataclass(frozen=True)
class Batch:
  groups: int = _f(16, 'groups a step')
  row_length: int = _f(512, 'tokens of a packed row')
  micro_rows: int = _f(4, 'rows of a micro-batch')
  share_prompts: bool = _f(True, 'segments that begin alike share a prefix in a row')

  def __post_init__(self):
    _at_least(self, 'batch.', 1, 'groups', 'row_length', 'micro_rows')


@dataclasses.dataclass(frozen=True)
class Optim:
  lr: float = _f(6e-4, 'learning rate, Muon (RMS-matched) and AdamW alike')
  warmup: int = _f(2, 'linear warm-up [steps]')
  muon_beta: float = _f(0.95, 'Muon momentum')
  ns_steps: int = _f(5, 'Newton-Schulz iterations')
  muon_per_head: bool = _f(False, 'every attention head is a matrix of its own')
  muon_stack: bool = _f(False, 'matrices of one shape at once: for accelerators')
  consistent_rms: float = _f(0.2, 'RMS of a Muon update, in units of lr')
  adam_b1: float = _f(0.9, 'AdamW first moment')
  adam_b2: float = _f(0.95, 'AdamW second moment')
  adam_eps: float = _f(1e-8, 'AdamW epsilon')
  weight_decay: float = _f(0.0, 'decoupled weight decay')
  exact_sum: bool = _f(False, 'sum gradients in a fixed binary tree: replica-proof')
  on_nonfinite: str = _f('skip', 'skip | stop: a step whose gradient is not finite')

  def __post_init__(self):
    _one_of(self, 'optim.', 'on_nonfinite', 'skip', 'stop')
    _above(self, 'optim.', 0, 'lr', 'consistent_rms', 'adam_eps')
    _at_least(self, 'optim.', 0, 'warmup', 'weight_decay')
    _at_least(self, 'optim.', 1, 'ns_steps')
    for name in ('muon_beta', 'adam_b1', 'adam_b2'):
      got = getattr(self, name)
      _want(0 <= got < 1, f'optim.{name}', got, 'in [0, 1)')


@dataclasses.dataclass(frozen=True)
class Sync:
  codec: str = _f('ulp', 'delta codec: ulp | ulp_ctx (smaller, slower) | xor')
  publish_every: int = _f(1, 'optimiser steps a version')
  full_every: int = _f(20, 'versions between full snapshots')
  block_bytes: int = _f(4 << 20, 'raw bytes of a block')
  object_bytes: int = _f(256 << 20, 'stored bytes at which a data object is closed')
  threads: int = _f(1, 'threads that encode or decode blocks')
  keep_fulls: int = _f(2, 'full snapshots (with their deltas) kept at least')
  keep_most: int = _f(200, 'versions kept for followers that are behind, at most')
  ack_seconds: float = _f(600.0, 'a follower not heard of for so long is gone [s]')
  restore_seconds: float = _f(120.0, 'longest a learner reads its base again [s]')
  verify_device: str = _f('digest', 'digest (pulls every byte back) | checksum')

  def __post_init__(self):
    _one_of(self, 'sync.', 'codec', 'ulp', 'ulp_ctx', 'xor')
    _at_least(self, 'sync.', 1, 'publish_every', 'full_every', 'block_bytes')
    _at_least(self, 'sync.', 1, 'object_bytes', 'threads')
    _at_least(self, 'sync.', 2, 'keep_fulls')
    _at_least(self, 'sync.', 1, 'keep_most')
    _at_least(self, 'sync.', 0, 'restore_seconds')
    _above(self, 'sync.', 0, 'ack_seconds')
    _one_of(self, 'sync.', 'verify_device', 'digest', 'checksum')


@dataclasses.dataclass(frozen=True)
class Relay:
  enabled: bool = _f(False, 'samplers get weights from relay nodes, not from the store')
  cluster: str = _f('main', 'name of this cluster; one controller for each')
  fanout: int = _f(4, 'children of a relay node, the k of the tree')
  samplers_per_node: int = _f(1, 'samplers of one host, which share its relay node')
  nodes: str = _f(
    '', 'host:port of every node, comma-separated; empty: found by the store'
  )
  host: str = _f('127.0.0.1', 'address that a relay node listens at')
  cache_bytes: int = _f(4 << 30, 'folder of one relay node at most [bytes]')
  poll_seconds: float = _f(0.5, 'how often the controller looks for a manifest [s]')
  wait_seconds: float = _f(5.0, 'how long a question for a new version is held [s]')
  stall_seconds: float = _f(5.0, 'silence after which a node is routed round [s]')
  bucket_last: bool = _f(True, 'who reaches no relay node reads the store itself')

  def node_of(self, sampler: int) -> int:
    """The relay node on the host of a sampler; node 0 is the controller."""
    return 1 + sampler // self.samplers_per_node

  def __post_init__(self):
    _at_least(self, 'relay.', 1, 'fanout', 'samplers_per_node', 'cache_bytes')
    _above(self, 'relay.', 0, 'poll_seconds', 'stall_seconds')
    _want(0 < self.wait_seconds <= 60, 'relay.wait_seconds', self.wait_seconds, '<= 60')
    plain = self.cluster.replace('-', '').replace('_', '').isalnum()
    plain = plain and self.cluster.isascii() and self.cluster[0] not in '-'
    _want(plain, 'relay.cluster', self.cluster, 'letters, digits, - and _')
    for place in filter(None, self.nodes.split(',')):
      host, _, port = place.strip().rpartition(':')
      _want(bool(host) and port.isdigit(), 'relay.nodes', place, 'host:port')


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  every: int = _f(5, 'optimiser steps between checkpoints')
  keep: int = _f(2, 'checkpoints kept')

  def __post_init__(self):
    _at_least(self, 'checkpoint.', 1, 'every', 'keep')


@dataclasses.dataclass(frozen=True)
class Config:
  """The root. `store` empty means `file://<run_dir>/store`."""

  run_dir: str = _f('', 'run folder; empty: runs/<config>-<time>')
  store: str = _f('', 'object store URL; empty: inside the run folder')
  seed: int = _f(0, 'seeds everything')
  steps: int = _f(24, 'optimiser steps')
  regions: int = _f(1, 'regions that samplers and rollouts are dealt out to, in turn')
  tasks: Tasks = Tasks()
  sandbox: Sandbox = Sandbox()
  agent: Agent = Agent()
  model: Model = Model()
  mesh: Mesh = Mesh()
  imitation: Imitation = Imitation()
  sampler: Sampler = Sampler()
  rollout: Rollout = Rollout()
  batch: Batch = Batch()
  loss: Loss = Loss()
  optim: Optim = Optim()
  sync: Sync = Sync()
  relay: Relay = Relay()
  checkpoint: Checkpoint = Checkpoint()

  @property
  def relay_nodes(self) -> int:
    """Relay nodes of this cluster, the controller included; 0 if there is no relay."""
    hosts = -(-self.sampler.processes // self.relay.samplers_per_node)
    return 1 + hosts if self.relay.enabled else 0

  def __post_init__(self):
    _at_least(self, '', 0, 'steps', 'seed')
    _at_least(self, '', 1, 'regions')
    _want(self.seed < 1 << 32, 'seed', self.seed, 'below 2**32')
    known = not self.store or _STORE.fullmatch(self.store)
    kinds = 'file:///absolute/folder, gs://bucket/prefix, s3://bucket/prefix, or empty'
    _want(bool(known), 'store', self.store, kinds)
    _refuse_contradictions(self)


def _refuse_contradictions(cfg: Config) -> None:
  """Pairs of settings that are each fine and cannot work together."""
  s, agent, batch = cfg.sampler, cfg.agent, cfg.batch
  if s.repetition_penalty != 1.0:
    raise ValueError(
      f'loss.replay={cfg.loss.replay} with sampler.repetition_penalty='
      f'{s.repetition_penalty}: a penalised draw depends on earlier text and cannot '
      'be replayed, nor scored without replay; set the penalty to 1.0'
    )
  for name, count in (('sampler', s.processes), ('rollout', cfg.rollout.processes)):
    _want(
      count >= cfg.regions,
      f'{name}.processes',
      count,
      f'at least one for each of regions={cfg.regions}',
    )
  if s.temperature <= 0:
    raise ValueError(
      f'sampler.temperature={s.temperature}: training rollouts need a temperature > 0'
    )
  if cfg.loss.replay and (s.top_p < 1 or s.min_p > 0) and s.top_k == 0:
    raise ValueError(
      'loss.replay=True with sampler.top_k=0: top_k bounds the recorded set; '
      'set it (64 is usual)'
    )
  if cfg.model.attention_kernel == 'splash' and batch.share_prompts:
    raise ValueError(
      "model.attention_kernel='splash' with batch.share_prompts=True: the kernel knows "
      'no shared prefixes; set batch.share_prompts=False'
    )
  if cfg.model.lora.rank and not cfg.model.source:
    raise ValueError(
      f'model.lora.rank={cfg.model.lora.rank} without model.source: adapters alone '
      'train, and what they are beside would stay as it was drawn; set model.source'
    )
  if agent.max_context > batch.row_length:
    raise ValueError(
      f'agent.max_context={agent.max_context} exceeds '
      f'batch.row_length={batch.row_length}: an episode must fit a row'
    )
  if agent.max_new_tokens >= agent.max_context:
    raise ValueError(
      f'agent.max_new_tokens={agent.max_new_tokens} leaves no room for a prompt in '
      f'agent.max_context={agent.max_context}'
    )
  # Groups sampled just before a publish are publish_every - 1 steps old at best.
  if cfg.sync.publish_every - 1 > cfg.rollout.max_staleness:
    raise ValueError(
      f'sync.publish_every={cfg.sync.publish_every} with rollout.max_staleness='
      f'{cfg.rollout.max_staleness}: every group would be too old to train on; '
      f'allow a staleness of at least {cfg.sync.publish_every - 1}'
    )
