"""A scripted agent that repairs functions through bash, in mini-swe-agent's format.

It stands where a sampler does, as scripted.py's does for our own loop, and is as clumsy
in the same ways. A turn is a word about what it suspects, and one call of `bash`:

  look        view
  comparison  edit «2»' <= ' && run_tests       or, untested: edit, then submit
  operator    undo && edit «4»' - ' && run_tests     after 'failed 2 of 6'
  done        echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT    after 'passed 6 of 6'

`play` answers these commands by repair.RepairEnv, as the shell would (shell_tools.py):
`episode` makes a whole conversation of both, with the ids that the real agent and the
real shell give, in a hundredth of the time.
"""

from collections.abc import Awaitable, Callable
import dataclasses
import functools
import json
import random
import shlex
from typing import Any

import jinja2
import numpy as np
import yaml

from swe17 import config, types
from swe17.agent import episode as episodes
from swe17.agent import formats, mini_swe_agent, record, scripted
from swe17.env.repair import anchors, repair, repair_shell, shell_tools

SUBMIT = f'echo {mini_swe_agent.MARK}'
BASH = {
  'type': 'function',
  'function': {
    'name': 'bash',
    'description': 'Execute a bash command',
    'parameters': {
      'type': 'object',
      'properties': {
        'command': {'type': 'string', 'description': 'The bash command to execute'}
      },
      'required': ['command'],
    },
  },
}


Generate = Callable[[types.GenerateRequest], Awaitable[types.GenerateResult]]


@dataclasses.dataclass(frozen=True)
class _Seen:
  """What the agent can know from its context."""

  source: str = ''  # as first viewed, '' before that
  tried: frozenset[tuple[str, str]] = frozenset()  # (anchor, new text)
  edited: bool = False  # the last edit is in place
  verdict: str = ''  # the last test's first word, '' if none since the last edit


class Scripted:
  """Usable as an episode's `generate`, as scripted.Scripted; no kept sets, log-probs 0.

  A draw depends on the seed drawn from `rng`, the request's key and its position only.
  """

  def __init__(self, fmt: formats.Format, rng: random.Random, style: scripted.Style):
    self._fmt = fmt
    self._seed = rng.getrandbits(64)
    self._style = style

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    rng = random.Random(f'{self._seed}/{request.key}/{request.token_T.size}')
    messages = self._fmt.messages(request.token_T.tolist())
    word, command = _turn(rng, self._style, _read(self._fmt, messages))
    ids = self._fmt.raw(word) if rng.random() < self._style.think else []
    ids = [*ids, *self._fmt.call('bash', command=command), self._fmt.stop_ids[0]]
    ids = ids[: request.max_new]
    n = len(ids)
    return types.GenerateResult(
      token_T=np.asarray(ids, np.int32),
      logp_T=np.zeros(n, np.float32),
      entropy_T=np.zeros(n, np.float32),
      version_T=np.zeros(n, np.int32),
      kept=types.KeptSets(np.zeros(n + 1, np.int32), np.zeros(0, np.int32)),
      finish='stop' if ids[-1] == self._fmt.stop_ids[0] else 'length',
    )


def quote(text: str) -> str:
  """A text as one word of bash: in single quotes, or in double ones if it has some."""
  if "'" not in text:
    return f"'{text}'"
  for special in '\\$`"':
    text = text.replace(special, f'\\{special}')
  return f'"{text}"'


def steps(command: str) -> list[list[str]]:
  """The words of a command's parts, which are joined by &&."""
  parts: list[list[str]] = [[]]
  for word in shlex.split(command):
    if word == '&&':
      parts.append([])
    else:
      parts[-1].append(word)
  return [_whole(part) for part in parts]


def _whole(words: list[str]) -> list[str]:
  if words[:1] == ['edit']:
    return ['edit', *shell_tools.place_and_text(words[1:])]
  return words


def _read(fmt: formats.Format, messages: list[tuple[str, str]]) -> _Seen:
  """Plays the conversation back."""
  seen = _Seen()
  command = ''
  for role, text in messages:
    if role == 'assistant':
      calls = fmt.read(text).calls
      command = calls[0].arguments.get('command', '') if calls else ''
    elif role == 'tool' and command == 'view':
      source = anchors.strip(text)
      seen = seen if seen.source else dataclasses.replace(seen, source=source)
    elif role == 'tool' and command:
      for step, line in zip(steps(command), text.split('\n'), strict=False):
        seen = _after(seen, step, line)
  return seen


def _after(seen: _Seen, step: list[str], result: str) -> _Seen:
  """What is known after one more result."""
  match step:
    case ['edit', at, new]:
      tried = seen.tried | {(at, new)}
      if result != 'edited':
        return dataclasses.replace(seen, tried=tried)
      return dataclasses.replace(seen, tried=tried, edited=True, verdict='')
    case ['undo'] if result == 'undone':
      return dataclasses.replace(seen, edited=False)
    case ['run_tests']:
      return dataclasses.replace(seen, verdict=result.partition(' ')[0])
  return seen


def _turn(rng: random.Random, style: scripted.Style, seen: _Seen) -> tuple[str, str]:
  """(what it says, the command) of the next turn."""
  if not seen.source:
    return 'look', 'view'
  found = scripted.edits(seen.source)
  if style.practice:
    if not found or rng.random() >= style.persist:
      return 'done', SUBMIT
    chosen = rng.choices(found, k=style.practice)
    parts = [part for at, new, _ in chosen for part in (_edit(at, new), 'undo')]
    return scripted.SUSPECT[chosen[0][2]], ' && '.join(parts)
  stop = seen.verdict == 'passed' or (seen.edited and not seen.verdict)
  if stop or (seen.verdict and rng.random() >= style.persist):
    return 'done', SUBMIT
  undo = seen.edited and rng.random() < style.undo
  fresh = [edit for edit in found if edit[:2] not in seen.tried]
  pool = found if rng.random() < style.retry_same else fresh
  if not pool:
    return 'done', SUBMIT
  at, new, kind = rng.choice(pool)
  parts = ['undo'] if undo else []
  parts.append(_edit(at, new))
  if rng.random() < style.test:
    parts.append('run_tests')
  return scripted.SUSPECT[kind], ' && '.join(parts)


def _edit(at: str, new: str) -> str:
  return f'edit {at}{quote(new)}'


# --- whole conversations, without a shell -----------------------------------------


async def play(env: repair.RepairEnv, command: str) -> tuple[str, int]:
  """(output, exit code) of a scripted command, as a repair_shell.RepairShell gives."""
  said, code = [], 0
  for step in steps(command):
    match step:
      case ['view']:
        text, code = await env.step('view', {}), 0
      case ['edit', at, new]:
        text = await env.step('edit', {'at': at, 'new': new})
        code = int(text != 'edited')
      case ['undo']:
        text = await env.step('undo', {})
        code = int(text != 'undone')
      case ['run_tests']:
        text = await env.step('test', {})
        code = int(not text.startswith('passed'))
      case _:
        raise ValueError(f'command: got {command!r}, want one of a scripted agent')
    said.append(f'{text}\n')
    if code:
      break
  return ''.join(said), code


class Templates:
  """What mini-swe-agent makes of a settings file: its messages, as it renders them."""

  def __init__(self, path: str = ''):
    with open(path or mini_swe_agent.SETTINGS, encoding='utf-8') as file:
      self._settings = yaml.safe_load(file)

  def opening(self, task: str) -> list[dict[str, Any]]:
    """The messages before the first turn."""
    agent = self._settings['agent']
    system = _render(agent['system_template'], task=task)
    user = _render(agent['instance_template'], task=task)
    return [{'role': 'system', 'content': system}, {'role': 'user', 'content': user}]

  def result(self, call_id: str, output: str, code: int) -> dict[str, Any]:
    """The message of a command's result."""
    told = {'output': output, 'returncode': code, 'exception_info': ''}
    content = _render(self._settings['model']['observation_template'], output=told)
    return {'role': 'tool', 'tool_call_id': call_id, 'content': content}


@functools.lru_cache(maxsize=16)
def _template(text: str) -> jinja2.Template:
  return jinja2.Template(text, undefined=jinja2.StrictUndefined)


def _render(template: str, **given: Any) -> str:
  return _template(template).render(**given)


async def episode(
  task: types.Task,
  env: repair.RepairEnv,
  agent: Generate,
  fmt: formats.Format,
  templates: Templates,
  cfg: config.Agent,
  group_id: str,
  member: int,
) -> types.Episode:
  """A scripted agent's whole conversation on a task, as far as it fits."""
  log = record.Record(fmt, lambda: 0.0)
  log.given(fmt.conversation(templates.opening(repair_shell.prompt(task)), [BASH]))
  request = types.GenerateRequest(
    session=f'{group_id}.{member}.0',
    token_T=np.zeros(0, np.int32),
    max_new=cfg.max_new_tokens,
    stop_ids=fmt.stop_ids,
    sampling=types.Sampling(),
    key=episodes.draw_key(0, group_id, member, 0),
  )
  command = ''
  for number in range(cfg.max_turns):
    room = min(cfg.max_new_tokens, cfg.max_context - len(log.token))
    if room <= 0:
      break
    token_T = np.asarray(log.token, np.int32)
    result = await agent(dataclasses.replace(request, token_T=token_T, max_new=room))
    log.sampled(result, number, 1.0)
    turn = result.token_T.tolist()
    calls = fmt.message(turn).get('tool_calls')
    if not calls:
      break
    command = json.loads(calls[0]['function']['arguments'])['command']
    log.calls += 1
    if command == SUBMIT:
      break
    output, code = await play(env, command)
    log.tests += 'run_tests' in command
    told = templates.result(calls[0]['id'], output, code)
    log.given(fmt.after(turn, [told], [BASH]))
  submitted = command == SUBMIT
  outcome = types.Outcome(0.0, 'not submitted')
  if submitted:
    outcome = await env.verify()
  return record.episode(
    task,
    group_id,
    member,
    outcome,
    segments=log.segments(),
    turns=log.turns,
    calls=log.calls,
    malformed=0,
    tests=log.tests,
    submitted=submitted,
    sampled_tokens=log.drawn,
    thinking_tokens=log.thinking,
    tool_seconds=0.0,
    seconds=0.0,
    cut=not submitted,
  )
