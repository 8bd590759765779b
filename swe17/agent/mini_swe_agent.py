"""Runs mini-swe-agent, as installed, for episodes that another process asks for.

  python -m swe17.agent.mini_swe_agent [settings.yaml]

  in   {"id", "base_url", "shell_url", "task", "turns", "seconds"}       a line each
  out  {"id", "exit": "Submitted" | another exit status, "error": text}    a line each

The package is used through what it documents: a settings file (that in data/ or
another), an API base, and an environment class. `Shell` is that class: it sends every
bash command to whoever keeps the episode's sandbox. What the agent submits is the
folder as it stands: its own `Submitted` says that it did.

Imports take seconds, so one process serves many episodes, each on a thread.
Source: mini-swe-agent.com, version 2.
"""

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import threading
from typing import Any, TextIO
import urllib.request

SETTINGS = pathlib.Path(__file__).parent / 'data' / 'mini_swe_agent.yaml'
MARK = 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'  # of the package's documentation
_THREADS = 64
_ATTEMPTS = '3'  # of one request, before the agent gives up
# Read by the package when it is imported. Nothing is fetched, nothing of a user's own
# settings is read, and tokens cost nothing.
_ENVIRONMENT = {
  'MSWEA_SILENT_STARTUP': '1',
  'MSWEA_COST_TRACKING': 'ignore_errors',
  'MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT': _ATTEMPTS,
  'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
}


@dataclasses.dataclass(frozen=True)
class ShellConfig:
  """What the package shows of an environment's settings."""

  url: str
  seconds: float


class Shell:
  """An environment of mini-swe-agent: commands run where `url` says."""

  def __init__(self, url: str, seconds: float):
    self.config = ShellConfig(url, seconds)
    self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

  def execute(self, action: Mapping[str, Any], cwd: str = '') -> dict[str, Any]:
    """Runs a command; raises the package's `Submitted` if it is the agent's submit."""
    from minisweagent import exceptions

    body = json.dumps({'command': action.get('command', '')}).encode()
    asked = urllib.request.Request(self.config.url, body)
    with self._opener.open(asked, timeout=self.config.seconds) as reply:
      output = json.load(reply)
    first, _, rest = output['output'].lstrip().partition('\n')
    if first.strip() == MARK and output['returncode'] == 0:
      end = {'exit_status': 'Submitted', 'submission': rest}
      raise exceptions.Submitted({'role': 'exit', 'content': rest, 'extra': end})
    return output

  def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(self.config), **kwargs}

  def serialize(self) -> dict[str, Any]:
    return {'info': {'config': {'environment': dataclasses.asdict(self.config)}}}


def main(argv: list[str]) -> int:
  """Serves stdin until it closes."""
  out = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)  # the package's own words go to the log
  lock = threading.Lock()
  with tempfile.TemporaryDirectory(prefix='mini-') as scratch:
    os.environ.update(_ENVIRONMENT, MSWEA_GLOBAL_CONFIG_DIR=scratch)
    # Proxies of the machine must not come between us and an address on it.
    for name in ('HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY'):
      for variable in (name, name.lower()):
        os.environ.pop(variable, None)
    import litellm
    from minisweagent import config

    litellm.suppress_debug_info = True  # it has no price of our model, and says so
    settings = config.get_config_from_spec(argv[0] if argv else SETTINGS)
    _say(out, lock, {'id': '', 'exit': 'ready', 'error': ''})
    with futures.ThreadPoolExecutor(_THREADS) as pool:
      for line in sys.stdin:
        pool.submit(_serve, json.loads(line), settings, out, lock)
  return 0


def _serve(
  job: Mapping[str, Any], settings: Mapping[str, Any], out: TextIO, lock: threading.Lock
) -> None:
  try:
    end, error = _run(job, settings), ''
  except Exception as e:
    # The agent's own failure, whatever it is, is an end of this episode alone.
    end, error = type(e).__name__, ' '.join(str(e).split())[:500]
  _say(out, lock, {'id': job['id'], 'exit': end, 'error': error})


def _say(out: TextIO, lock: threading.Lock, said: Mapping[str, Any]) -> None:
  with lock:
    out.write(json.dumps(said) + '\n')


def _run(job: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
  """One episode, with the package's own parts; its exit status."""
  from minisweagent import environments, models
  from minisweagent.agents import default

  model = dict(settings['model'])
  given = model.get('model_kwargs', {})
  model['model_kwargs'] = {**given, 'api_base': job['base_url'], 'api_key': 'none'}
  shell = {
    'environment_class': 'swe17.agent.mini_swe_agent.Shell',
    'url': job['shell_url'],
    'seconds': job['seconds'],
  }
  agent = default.DefaultAgent(
    models.get_model(config=model),
    environments.get_environment(shell),
    **{**settings['agent'], 'step_limit': job['turns']},
  )
  return agent.run(job['task']).get('exit_status', '')


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
