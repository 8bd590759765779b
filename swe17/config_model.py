"""Settings of the model: its shape, family by family, and how it is computed.

Two choices make the families: attention (`gqa`, or DeepSeek's `mla`) and what follows
it (a dense layer, or `experts`). The other settings are what their members differ in.
With `source` all of the shape is read from the model's own files.
"""

import dataclasses
import math

from swe17 import fields

_f, _want = fields.setting, fields.want
_at_least, _above, _one_of = fields.at_least, fields.above, fields.one_of


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary positions; see model/rope.py for the formulas."""

  theta: float = _f(1_000.0, 'base')
  scaling: str = _f('none', 'none | linear | llama3 | yarn')
  factor: float = _f(1.0, 'how much longer than the original context')
  original: int = _f(0, 'positions the model was first trained on')
  low: float = _f(1.0, 'llama3: low_freq_factor; yarn: beta_slow [turns]')
  high: float = _f(4.0, 'llama3: high_freq_factor; yarn: beta_fast [turns]')
  truncate: bool = _f(True, 'yarn: bounds of the ramp are whole dimensions')
  amplitude: float = _f(1.0, 'factor of sine and cosine (yarn: attention_factor)')

  def __post_init__(self):
    at = 'model.rope.'
    _one_of(self, at, 'scaling', 'none', 'linear', 'llama3', 'yarn')
    _above(self, at, 0, 'theta', 'factor', 'low', 'high', 'amplitude')
    _at_least(self, at, 0, 'original')
    if self.scaling in ('llama3', 'yarn'):
      _want(self.original > 0, f'{at}original', self.original, 'above 0')
      # llama3 blends over low .. high; a ramp of yarn may have no width (Kimi-K2).
      apart = self.low < self.high or (self.scaling == 'yarn' and self.low == self.high)
      _want(apart, f'{at}low', self.low, f'below high={self.high}')


@dataclasses.dataclass(frozen=True)
class Mla:
  """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

  q_rank: int = _f(0, 'rank of the query projection, 0: full')
  kv_rank: int = _f(64, 'rank of keys and values: what is cached, beside rotary_dim')
  v_dim: int = _f(32, 'dimensions of a value head')

  def __post_init__(self):
    _at_least(self, 'model.mla.', 0, 'q_rank')
    _at_least(self, 'model.mla.', 1, 'kv_rank', 'v_dim')


@dataclasses.dataclass(frozen=True)
class Moe:
  """A mixture of experts in the place of the dense layer."""

  experts: int = _f(0, 'E; 0: dense')
  active: int = _f(2, 'experts a token')
  ffn: int = _f(128, 'F of an expert')
  shared: int = _f(0, 'experts that every token uses (one layer, this many times F)')
  first_dense: int = _f(0, 'leading layers that stay dense')
  router: str = _f('softmax', 'softmax | sigmoid (with a bias that selects only)')
  renormalise: bool = _f(True, 'weights of the chosen experts sum to 1')
  groups: int = _f(1, 'sigmoid: equal groups of experts')
  best_groups: int = _f(1, 'sigmoid: groups that a token may use')
  scale: float = _f(1.0, 'sigmoid: factor of the routed experts')
  replay: bool = _f(True, 'samplers record routes, the learner replays them (R3)')
  bias_speed: float = _f(0.0, 'sigmoid: step of the bias that balances load; 0: still')
  capacity: float = _f(2.0, 'expert-parallel: rows a shard may get, over its fair part')
  exchange: str = _f('auto', 'auto | blocks | ragged: how rows go to their experts')
  quantise: str = _f(
    'none', 'none | weights | both: NVFP4 fake quantisation of experts'
  )

  def __post_init__(self):
    at = 'model.moe.'
    _at_least(self, at, 0, 'experts', 'shared', 'first_dense')
    _at_least(self, at, 1, 'active', 'ffn', 'groups', 'best_groups', 'capacity')
    _above(self, at, 0, 'scale')
    _one_of(self, at, 'router', 'softmax', 'sigmoid')
    _one_of(self, at, 'quantise', 'none', 'weights', 'both')
    _one_of(self, at, 'exchange', 'auto', 'blocks', 'ragged')
    _at_least(self, at, 0, 'bias_speed')
    if self.experts:
      _want(self.experts <= 1 << 15, f'{at}experts', self.experts, 'at most 32768')
      if self.bias_speed:
        want = 'sigmoid, which has the bias of bias_speed'
        _want(self.router == 'sigmoid', f'{at}router', self.router, want)
      most = self.experts // self.groups * self.best_groups
      _want(self.active <= most, f'{at}active', self.active, f'at most {most}')
      _want(
        self.experts % self.groups == 0,
        f'{at}groups',
        self.groups,
        f'a divisor of experts={self.experts}',
      )

  @property
  def route_dtype(self) -> str:
    """The dtype that recorded ids are kept and sent in."""
    return 'uint8' if self.experts <= 256 else 'uint16'


@dataclasses.dataclass(frozen=True)
class Lora:
  """Adapters that train in the place of the matrices beside them; model/lora.py.

  Names are those that their matrices have in files: q k v o (q_a q_b kv_a kv_b o with
  mla, q where `mla.q_rank` is 0), gate up down of dense layers and of shared experts,
  expert_gate expert_up expert_down of the routed ones. Embedding, head, norms, biases
  and routers have none: they stay as they are.
  """

  rank: int = _f(0, 'r; 0: no adapters, all parameters train')
  alpha: float = _f(32.0, 'adapters count alpha / rank times')
  targets: str = _f('all', 'all | names of matrices, comma-separated')

  def __post_init__(self):
    at = 'model.lora.'
    _at_least(self, at, 0, 'rank')
    _above(self, at, 0, 'alpha')
    for name in self.names:
      one_of = ('all', *_ADAPTED)
      _want(name in one_of, f'{at}targets', name, 'one of ' + ', '.join(one_of))
    _want(
      len(set(self.names)) == len(self.names), f'{at}targets', self.targets, 'each once'
    )

  @property
  def names(self) -> tuple[str, ...]:
    """The targets as they were given."""
    return tuple(name.strip() for name in self.targets.split(','))


# Every matrix that an adapter may stand beside.
_ADAPTED = (
  'q', 'k', 'v', 'o', 'q_a', 'q_b', 'kv_a', 'kv_b', 'gate', 'up', 'down',
  'expert_gate', 'expert_up', 'expert_down',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
  source: str = _f('', 'folder, .gguf file or pip:package of a model; empty: none')
  layers: int = _f(2, 'N')
  width: int = _f(192, 'D')
  ffn: int = _f(384, 'F of a dense layer')
  attention: str = _f('gqa', 'gqa (grouped queries) | mla (latent keys and values)')
  heads: int = _f(4, 'Q')
  kv_heads: int = _f(4, 'C; with mla the heads')
  head_dim: int = _f(48, 'H of queries and keys')
  rotary_dim: int = _f(12, 'dimensions of a head that rotate: gqa leading, mla last')
  tied: bool = _f(True, 'the head is the embedding')
  bias: bool = _f(False, 'biases of queries, keys and values')
  qk_norm: bool = _f(False, 'RMS norm of every query and key head')
  norm_eps: float = _f(1e-6, 'RMS norm epsilon')
  score_scale: float = _f(1.0, 'factor of q k / sqrt(H) (yarn: mscale squared)')
  ngram: int = _f(2, 'tokens an embedding spans; 1: its own alone')
  rope: Rope = Rope()
  mla: Mla = Mla()
  moe: Moe = Moe()
  lora: Lora = Lora()
  dtype: str = _f('float32', 'float32 | bfloat16: what matrices are multiplied in')
  attention_kernel: str = _f('chunked', 'chunked | cudnn (GPU) | splash (TPU)')
  attention_chunk: int = _f(128, 'queries attended at once in training')
  remat: bool = _f(False, 'recompute layers in the backward pass')
  unroll: bool = _f(True, 'unroll the loop over layers: faster on CPU')

  def __post_init__(self):
    at = 'model.'
    _at_least(self, at, 1, 'layers', 'width', 'ffn', 'heads', 'kv_heads', 'ngram')
    _at_least(self, at, 1, 'attention_chunk')
    _at_least(self, at, 2, 'head_dim')
    _above(self, at, 0, 'norm_eps', 'score_scale')
    _one_of(self, at, 'attention', 'gqa', 'mla')
    _one_of(self, at, 'attention_kernel', 'chunked', 'cudnn', 'splash')
    _one_of(self, at, 'dtype', 'float32', 'bfloat16')
    _want(
      self.heads % self.kv_heads == 0,
      'model.kv_heads',
      self.kv_heads,
      f'a divisor of model.heads={self.heads}',
    )
    _want(
      2 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
      'model.rotary_dim',
      self.rotary_dim,
      f'even, from 2 to model.head_dim={self.head_dim}',
    )
    if self.attention == 'mla':
      _want(not (self.bias or self.qk_norm), 'model.bias', True, 'none with mla')
      _want(self.kv_heads == self.heads, 'model.kv_heads', self.kv_heads, 'heads (mla)')
    if self.moe.experts:
      _want(
        self.moe.first_dense < self.layers,
        'model.moe.first_dense',
        self.moe.first_dense,
        f'below model.layers={self.layers}',
      )
    if not self.source:  # else: when the shape has been read
      self.check_adapted()
    if self.lora.rank and self.moe.bias_speed:
      want = '0 with model.lora.rank: only adapters train'
      _want(False, 'model.moe.bias_speed', self.moe.bias_speed, want)

  def check_adapted(self) -> None:
    """ValueError names a target of `lora` that a model of this shape has not."""
    for name in self.lora.names if self.lora.rank else ():
      known = ('all', *self._matrices)
      want = f'one of {", ".join(known)} (the matrices of this model)'
      _want(name in known, 'model.lora.targets', name, want)

  @property
  def adapted(self) -> tuple[str, ...]:
    """Names of the matrices with an adapter; see `Lora`."""
    if not self.lora.rank:
      return ()
    every = 'all' in self.lora.names
    return tuple(x for x in self._matrices if every or x in self.lora.names)

  @property
  def _matrices(self) -> tuple[str, ...]:
    queries = ('q_a', 'q_b') if self.mla.q_rank else ('q',)
    found = (*queries, 'kv_a', 'kv_b') if self.attention == 'mla' else ('q', 'k', 'v')
    if self.dense_layers or self.moe.shared:
      found += ('gate', 'up', 'down')
    if self.moe.experts:
      found += ('expert_gate', 'expert_up', 'expert_down')
    return (*found, 'o')

  @property
  def dense_layers(self) -> int:
    return self.moe.first_dense if self.moe.experts else self.layers

  @property
  def moe_layers(self) -> int:
    return self.layers - self.dense_layers

  @property
  def routes(self) -> tuple[int, int, int] | None:
    """(layers, experts a token, experts) of recorded routes; None: none are."""
    if not (self.moe.experts and self.moe.replay):
      return None
    return self.moe_layers, self.moe.active, self.moe.experts


@dataclasses.dataclass(frozen=True)
class Mesh:
  """The learner's mesh; the product is the number of devices. See model/sharding.py.

  The devices are dealt out evenly to `processes`: learner/team.py.
  """

  replica: int = _f(1, 'whole copies of the model')
  fsdp: int = _f(1, 'parameters and rows split')
  expert: int = _f(1, 'experts and rows split')
  context: int = _f(1, 'positions of a row split')
  tensor: int = _f(1, 'heads, feed-forward and vocabulary split')
  processes: int = _f(1, 'learner processes that share the devices')
  coordinator: str = _f('', 'host:port of learner process 0; empty: one machine')
  heartbeat_seconds: int = _f(20, 'silence after which a learner process is gone [s]')

  def __post_init__(self):
    _at_least(self, 'mesh.', 1, 'replica', 'fsdp', 'expert', 'context', 'tensor')
    _at_least(self, 'mesh.', 1, 'processes')
    _at_least(self, 'mesh.', 5, 'heartbeat_seconds')
    want = f'a divisor of the number of devices, {self.devices} by the other settings'
    even = self.devices % self.processes == 0
    _want(even, 'mesh.processes', self.processes, want)
    host, _, port = self.coordinator.rpartition(':')
    named = not self.coordinator or bool(host and port.isdigit())
    _want(named, 'mesh.coordinator', self.coordinator, 'host:port')

  @property
  def sizes(self) -> dict[str, int]:
    """Size of every axis."""
    return {axis: getattr(self, axis) for axis in _AXES}

  @property
  def devices(self) -> int:
    """How many there are in all."""
    return math.prod(self.sizes.values())


_AXES = ('replica', 'fsdp', 'expert', 'context', 'tensor')  # as in model/sharding.py
