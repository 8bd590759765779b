"""`model.source`: the shape is the files', written out, and not to be contradicted."""

import json
import pathlib

import pytest

from experiments import options
from swe17 import config, settings
from swe17.agent import formats
from tests import chat_templates

SHAPE = {
  'architectures': ['LlamaForCausalLM'], 'hidden_size': 32, 'intermediate_size': 64,
  'num_hidden_layers': 3, 'num_attention_heads': 2, 'num_key_value_heads': 1,
  'rms_norm_eps': 1e-5, 'vocab_size': 384, 'tie_word_embeddings': True,
  'rope_theta': 1e4,
}  # fmt: skip
READ = {
  'model.layers': 3, 'model.width': 32, 'model.ffn': 64, 'model.heads': 2,
  'model.kv_heads': 1, 'model.head_dim': 16, 'model.rotary_dim': 16, 'model.ngram': 1,
  'model.norm_eps': 1e-5, 'model.rope.theta': 1e4,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(SHAPE))
  (folder / 'tokenizer.json').write_text(json.dumps(chat_templates.spec('qwen')))
  (folder / 'chat_template.jinja').write_text(chat_templates.QWEN)
  return folder


@pytest.fixture
def base(tmp_path, model):
  path = tmp_path / 'config.py'
  path.write_text(
    'from swe17 import settings\ndef get_config():\n  cfg = settings.default()\n'
    f'  cfg.model.source = {str(model)!r}\n  return cfg\n'
  )
  return [f'--config={path}', f'--run_dir={tmp_path / "run"}']


def test_the_shape_is_read_and_says_where_it_is_from(base, model):
  chosen = options.parse(base)
  found = settings.flatten(chosen.cfg)
  default = settings.flatten(config.Config())
  for name, value in READ.items():
    assert found[name] == value
  changed = {name for name in found if found[name] != default[name]}
  assert changed == READ.keys() | {'model.source', 'run_dir'}
  document = settings.to_json(chosen.cfg, chosen.origin)
  assert {n for n, leaf in document.items() if leaf['origin'] == 'source'} == (
    READ.keys()
  )
  assert found['model.source'] == str(model)
  assert settings.from_json(document) == chosen.cfg


def test_the_vocabulary_is_the_model_s(model):
  assert formats.load(str(model)).vocab_size == SHAPE['vocab_size']


@pytest.mark.parametrize(
  'flag',
  ['model.layers=4', 'model.layers=2', 'model.ngram=2', 'model.rope.theta=1000.0'],
)
def test_a_flag_that_contradicts_the_files_is_refused_by_name(base, flag):
  name = flag.partition('=')[0]
  with pytest.raises(ValueError, match=f'{name}: got .* files'):
    options.parse([*base, f'--config.{flag}'])


def test_a_flag_that_agrees_and_how_it_is_computed_are_taken(base):
  flags = ['--config.model.layers=3', '--config.model.remat=true']
  chosen = options.parse([*base, *flags])
  assert (chosen.cfg.model.layers, chosen.cfg.model.remat) == (3, True)
  assert chosen.origin['model.layers'] == chosen.origin['model.remat'] == 'flag'


def test_a_relative_path_is_made_absolute(base, model, monkeypatch):
  monkeypatch.chdir(model.parent)
  chosen = options.parse([*base, '--config.model.source=model'])
  assert pathlib.Path(chosen.cfg.model.source) == model


def test_a_run_goes_on_with_the_shape_it_has(base, model, tmp_path):
  chosen = options.parse(base)
  run = tmp_path / 'run'
  run.mkdir()
  document = json.dumps(settings.to_json(chosen.cfg, chosen.origin))
  (run / 'config.json').write_text(document)
  resume = ['--resume', f'--run_dir={run}']
  assert options.parse([*base, '--resume']).cfg == chosen.cfg
  assert options.parse(['--role=learner', f'--run_dir={run}']).cfg.model == (
    chosen.cfg.model
  )
  (model / 'config.json').unlink()  # the settings are known without it
  again = options.parse(resume)
  assert again.cfg.model == chosen.cfg.model
  assert again.origin == dict(chosen.origin)


@pytest.mark.parametrize('source', ['/nowhere', 'pip:no_such_package_here'])
def test_a_source_that_is_not_there_is_named(base, source):
  with pytest.raises(FileNotFoundError, match=r'model\.source'):
    options.parse([*base, f'--config.model.source={source}'])
